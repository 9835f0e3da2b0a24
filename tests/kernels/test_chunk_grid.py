"""Document boundaries at chunks, decay tables, and the checks of tuning configurations."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.core.boundaries import DocumentBoundaries
from pallas_kernels.core.decay_tables import (
  scalar_decay_tables,
)
from pallas_kernels.delta_rule import config as delta_rule
from pallas_kernels.linear_attention import config as linear_attention
from pallas_kernels.linear_attention.config import CHUNK

HALF = CHUNK // 2
# Four chunks: the second document begins inside the second chunk, the third one with the fourth.
LENGTHS = (CHUNK + HALF, CHUNK + HALF, CHUNK)
SEGMENTS = jnp.asarray(np.repeat([0, 1, 2], LENGTHS)[None], jnp.int32)


def test_document_boundaries_inside_and_between_chunks_cut_the_state():
  documents = DocumentBoundaries.of(SEGMENTS)
  in_chunks = np.asarray(documents.in_chunks(CHUNK))
  sees, reaches = in_chunks.reshape(2, 4, 2, HALF).mean(-1)
  np.testing.assert_array_equal(sees, [[1, 1], [1, 0], [1, 1], [0, 0]])
  np.testing.assert_array_equal(reaches, [[1, 1], [0, 1], [1, 1], [1, 1]])


def test_document_boundaries_reset_decays_of_chunks_only_with_documents():
  decay = jnp.full((1, 2, 1, 3), 0.5)
  reset = DocumentBoundaries.of(SEGMENTS).reset(decay, CHUNK)
  np.testing.assert_array_equal(reset[0, 1, :, 2], [0.5, 0.0, 0.5, 0.0])
  assert DocumentBoundaries.of(None).reset(decay, CHUNK) is decay


@pytest.mark.parametrize("tokens", [1, 4 * CHUNK], ids=["constant", "per token"])
def test_scalar_decay_tables_with_documents_hold_the_reset(tokens):
  log_decay = jnp.full((1, tokens, 1), -0.01)
  documents = DocumentBoundaries.of(SEGMENTS)
  tables = scalar_decay_tables(
    log_decay, documents, length=4 * CHUNK, padded=4 * CHUNK, chunk=CHUNK
  )
  sees, reaches = (np.asarray(x).reshape(-1) > 0 for x in documents.in_chunks(CHUNK))
  np.testing.assert_array_equal(tables.before[0, 0] > 0, sees)
  np.testing.assert_array_equal(tables.after[0, 0] > 0, reaches)
  np.testing.assert_array_equal(tables.total[0, 0] > 0, [True, False, True, False])


GLA = linear_attention.Shape(8, 2048, 16, 16, 128, 128, "BTHK", False)
LINEAR = linear_attention.default(GLA)
DELTA = delta_rule.default(delta_rule.Shape(128, 128, 128, False)).forward


@pytest.mark.parametrize(
  ("config", "change", "message"),
  [
    (LINEAR.outputs, {"value_tile": 96}, "value_tile=96 must be 64 or 128"),
    (LINEAR.outputs, {"num_stages": 1}, "num_stages=1 must be at least 2"),
    (LINEAR.query_gradient, {"blocks_per_cta": 0}, "blocks_per_cta=0 must be at least 1"),
    (LINEAR, {"chunk": 32}, "chunk=32 must be 64 or 128"),
    (DELTA, {"num_stages": 0}, "num_stages=0 must be at least 1"),
    (DELTA, {"value_tile": 48}, "value_tile=48"),
  ],
)
def test_tuning_config_with_a_wrong_value_is_rejected_by_name(config, change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(config, **change)

"""Document boundaries at chunks, decay tables, and the checks of tuning configurations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.ops.core import dispatch
from pallas_kernels.core.boundaries import DocumentBoundaries
from pallas_kernels.core.decay_tables import (
  TableGradients,
  padded_numbers,
  scalar_decay_tables,
  token_decay_gradient,
  token_decay_tables,
)
from pallas_kernels.core.wgmma import Backend
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


def test_token_decay_kernels_equal_the_tables_of_each_document_and_their_gradient():
  """Of a row of two documents and padding, against XLA's tables of each document apart."""
  backend = Backend(dispatch.interpreter())
  rng = np.random.default_rng(0)
  cut, length, padded = 20, 45, CHUNK  # the second document follows token 20
  log_decay = jnp.asarray(-rng.exponential(0.3, (1, length, 1)), jnp.float32)
  ids = jnp.asarray(np.arange(padded)[None] >= cut, jnp.int32)
  documents = DocumentBoundaries.of(ids)
  numbers = padded_numbers(log_decay, tokens=padded)
  tables = token_decay_tables(numbers, documents, heads=1, chunk=CHUNK, backend=backend)
  shape = 1, 1, padded
  later, earlier, before, after = rng.normal(size=(4, *shape)).astype(np.float32)
  d_tables = TableGradients(later, earlier, before, after, jnp.ones((1, 1, 1)))
  gradient = token_decay_gradient(tables, d_tables, documents, chunk=CHUNK, backend=backend)

  def expected(log_decay):
    """The tables by a loop over tokens, with masks of documents."""
    g = jnp.pad(log_decay[0, :, 0], (0, padded - length))
    i = np.arange(padded)
    same = np.asarray(ids[0])[:, None] == np.asarray(ids[0])[None]
    cumulative = jnp.where(same & (i[:, None] >= i), g, 0.0).sum(1)
    following = jnp.where(same & (i[:, None] < i), g, 0.0).sum(1)
    in_first = i < cut
    return cumulative, jnp.exp(cumulative) * in_first, jnp.exp(following) * ~in_first

  want, pull = jax.vjp(expected, log_decay)
  for x, y in zip(tables, want, strict=False):
    np.testing.assert_allclose(x[0, 0], y, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(tables.total, [[[0.0]]])
  (wanted,) = pull((later[0, 0] - earlier[0, 0], before[0, 0], after[0, 0]))
  got = gradient[0, 0, :length] - 1.0  # that of the sum over the chunk
  np.testing.assert_allclose(got, wanted[0, :, 0], rtol=1e-5, atol=2e-5)


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

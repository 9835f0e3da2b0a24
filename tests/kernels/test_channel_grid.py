"""Modules that kernels with one state per channel share: boundaries, tile sizes, the time loop."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.causal_conv1d import config as causal_conv1d
from pallas_kernels.channel_states import config as channel_states
from pallas_kernels.core import boundaries
from pallas_kernels.core import channel_grid as grid
from pallas_kernels.core.compensated_sum import fast_two_sum
from pallas_kernels.diagonal_scan import config as diagonal_scan


def test_reset_of_nan_at_boundary_returns_empty():
  state = jnp.array([jnp.nan, jnp.inf]), jnp.array([1.0, 2.0])
  got = boundaries.reset(jnp.array(True), state, (0.0, -1.0))
  np.testing.assert_array_equal(got, [[0, 0], [-1, -1]])
  np.testing.assert_array_equal(boundaries.reset(jnp.array(False), state, (0.0, -1.0)), state)
  assert boundaries.reset(None, state, (0.0, -1.0)) is state


def test_in_splits_with_boundaries_names_their_splits():
  first = jnp.zeros((2, 12), bool).at[0, 5].set(True).at[1, 0].set(True).at[1, 11].set(True)
  want = np.array([[0, 1, 0], [1, 0, 1]], bool)[..., None]
  np.testing.assert_array_equal(boundaries.in_splits(first, 3), want)
  assert boundaries.in_splits(None, 3) is None


def test_flags_are_zero_in_chunks_without_a_first_token_only():
  first = jnp.zeros((2, 12), bool).at[0, 5].set(True).at[1, 0].set(True).at[1, 11].set(True)
  want = np.zeros((2, 12), np.int32)
  want[0, 4], want[0, 5], want[1, 0], want[1, 8], want[1, 11] = -1, 1, 1, -1, 1
  np.testing.assert_array_equal(boundaries.as_flags(first, 4), want)
  assert boundaries.as_flags(None, 4) is None


def test_pack_bits_of_any_length_returns_every_flag():
  first = np.random.default_rng(0).random((2, 21)) < 0.4
  words = boundaries.pack_bits(jnp.asarray(first), 8)
  assert words.shape == (2, 3)
  got = [[boundaries.bit(words[b, t // 8], t % 8) for t in range(21)] for b in range(2)]
  np.testing.assert_array_equal(got, first)
  assert boundaries.bit(boundaries.pack_bits(None, 8), 0) is None


def test_fast_two_sum_of_small_term_keeps_rounding_error():
  got = fast_two_sum(jnp.float32(1.0), jnp.float32(2.0**-30))
  assert (float(got.high), float(got.low)) == (1.0, 2.0**-30)


SCAN = channel_states.default(channel_states.Shape("longhorn_scan", 256, 16, 2, 2, 2))
CONVOLUTION = causal_conv1d.default(causal_conv1d.Shape(256, 2, 1, 0)).forward


@pytest.mark.parametrize(
  ("config", "change", "message"),
  [
    (grid.PipelineConfig(16, 4), {"chunk": 12}, "chunk=12 must divide 32"),
    (grid.PipelineConfig(16, 4), {"stages": 0}, "stages=0: not one chunk of 16 tokens"),
    (SCAN.backward, {"lanes": 3}, "lanes=3 must be 1, 2 or 4"),
    (SCAN.backward, {"chunk": 12}, "chunk=12 must be 16"),
    (SCAN.backward, {"tokens_per_sum": 3}, "tokens_per_sum=3 must divide"),
    (SCAN.forward, {"unroll": 5}, "unroll=5 must divide"),
    (CONVOLUTION, {"vector": 3}, "vector=3 must be 1, 2, 4"),
    (CONVOLUTION, {"group": 32}, "group=32 must be 1 to 31"),
  ],
  ids=str,
)
def test_configs_that_do_not_fit_raise(config, change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(config, **change)


def test_diagonal_scan_config_by_bytes_fits_in_smem():
  """bfloat16, float32 and complex numbers: the longest chunk with four stages."""
  shapes = [diagonal_scan.Shape(n, n, n) for n in (2, 4, 8)]
  configs = [diagonal_scan.default(shape) for shape in shapes]
  for kernel in ("forward", "forward_states", "backward", "backward_states"):
    chunks = [getattr(config, kernel).chunk for config in configs]
    assert chunks == sorted(chunks, reverse=True)
    assert all(getattr(config, kernel).stages >= 4 for config in configs)
  with pytest.raises(ValueError, match="do not fit in SMEM"):
    diagonal_scan.default(diagonal_scan.Shape(200, 200, 4))


def test_padded_length_with_splits_gives_whole_flag_copies():
  assert [grid.padded_length(n, 1) for n in (1, 32, 33)] == [32, 32, 64]
  assert grid.padded_length(100, 4) == 128
  assert grid.padded_length(129, 4) == 256

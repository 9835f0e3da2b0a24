"""The short convolution: values, state, packed documents, to the last bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.mixers.short_convolution import short_convolution

B, T, D, W = 2, 9, 3, 4


def draw(*shape, seed=0):
  return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


KERNEL, BIAS, X = draw(W, D, seed=1), draw(D, seed=2), draw(B, T, D, seed=3)


def test_matches_a_loop():
  y, state = short_convolution(X, KERNEL, BIAS)
  padded = np.concatenate([np.zeros((B, W - 1, D)), np.float64(X)], axis=1)
  for t in range(T):
    want = np.float64(BIAS) + np.einsum("wd,bwd->bd", np.float64(KERNEL), padded[:, t : t + W])
    np.testing.assert_allclose(y[:, t], want, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(state, X[:, -3:])


@pytest.mark.parametrize("cut", [1, 2, 5, 8])
def test_splitting_gives_the_same_bits(cut):
  whole, last = short_convolution(X, KERNEL, BIAS)
  left, state = short_convolution(X[:, :cut], KERNEL, BIAS)
  right, state = short_convolution(X[:, cut:], KERNEL, BIAS, state)
  np.testing.assert_array_equal(jnp.concatenate([left, right], axis=1), whole)
  np.testing.assert_array_equal(state, last)


def test_packed_rows_with_boundaries_of_their_own_give_the_same_bits():
  """Documents shorter than the kernel, a NaN in one of them, and a state before the first."""
  before = draw(B, W - 1, D, seed=4)
  x = X.at[0, 1].set(jnp.nan)
  lengths = ([2, 1, 6], [1, 7, 1])
  ids = np.stack([np.repeat([5, 2, 5], row) for row in lengths])
  packed, last = short_convolution(x, KERNEL, BIAS, before, ids)
  for row in range(B):
    start = 0
    for number, length in enumerate(lengths[row]):
      piece = x[row : row + 1, start : start + length]
      state = before[row : row + 1] if number == 0 else None
      y, state = short_convolution(piece, KERNEL, BIAS, state)
      np.testing.assert_array_equal(packed[row, start : start + length], y[0])
      start += length
    np.testing.assert_array_equal(last[row], state[0])
  assert np.isnan(packed[0, 1]).all() and not np.isnan(packed[0, 2:]).any()


def test_small_dtypes_are_summed_in_float32():
  y, state = short_convolution(X.astype(jnp.bfloat16), KERNEL)
  want, _ = short_convolution(X.astype(jnp.bfloat16).astype(jnp.float32), KERNEL)
  assert y.dtype == state.dtype == jnp.float32
  np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize(
  "arguments, message",
  [
    ((X[0], KERNEL), r"x has shape \(9, 3\)"),
    ((X, KERNEL[:, :2]), r"kernel has shape \(4, 2\)"),
    ((X, KERNEL, None, X[:, :4]), r"state has shape \(2, 4, 3\)"),
    ((X, KERNEL, None, None, jnp.ones((2, 3), int)), r"segment_ids has shape \(2, 3\)"),
  ],
)
def test_bad_arguments_are_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    short_convolution(*arguments)

"""rotary_embedding: its formula in float64, and relative positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.ops.attention.rotary import rotary_embedding
from tests.ops import contract

B, T, H, K = 2, 6, 3, 8
X = np.random.default_rng(0).normal(size=(B, T, H, K)).astype(np.float32)


def formula(x, positions, base, width, interleaved):
  """Pair by pair, in float64."""
  out = np.asarray(x, np.float64).copy()
  for i in range(width // 2):
    first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
    angle = (positions * float(base) ** (-2 * i / width))[..., None]
    a, b = np.asarray(x[..., first], np.float64), np.asarray(x[..., second], np.float64)
    out[..., first] = a * np.cos(angle) - b * np.sin(angle)
    out[..., second] = a * np.sin(angle) + b * np.cos(angle)
  return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("base", "width"), [(10000, None), (500000.0, 4), (7, 6)])
@pytest.mark.parametrize("largest", [9, pytest.param(131_072, marks=pytest.mark.slow), 10**9])
def test_rotary_embedding_far_positions_equal_the_formula(interleaved, base, width, largest):
  """To the rounding of float32, however far along the sequence."""
  positions = np.random.default_rng(1).integers(largest, size=(B, T))
  positions.flat[0] = largest
  got = rotary_embedding(X, positions, base, width=width, interleaved=interleaved)
  want = formula(X, positions, base, width or K, interleaved)
  assert contract.relative_error(got, want) <= contract.tolerance(jnp.float32, 1)


LLAMA3 = {"rule": "llama3", "factor": 8.0, "low_frequency_factor": 1.0}
LLAMA3 |= {"high_frequency_factor": 4.0, "original_length": 26}


def scaled(angle, turns, scaling):
  """A pair's angle; it turns `turns` times in the original length."""
  slow = angle / scaling["factor"]
  if scaling["rule"] == "linear" or turns < 1:
    return slow
  return angle if turns > 4 else ((4 - turns) * slow + (turns - 1) * angle) / 3


@pytest.mark.parametrize("scaling", [{"rule": "linear", "factor": 4}, LLAMA3])
def test_rotary_embedding_scaled_frequencies_equal_the_formula(scaling):
  base, position = 15.0, 1003
  x = X[:, :1]
  got = rotary_embedding(x, jnp.asarray([position]), base, scaling=scaling)
  frequency = base ** (-np.arange(4) / 4)
  turns = 26 * frequency / (2 * np.pi)  # 4.1, 2.1, 1.1 and 0.5
  angle = [scaled(position * f, n, scaling) for f, n in zip(frequency, turns, strict=True)]
  a, b = np.split(x.astype(np.float64), 2, axis=-1)
  cos, sin = np.cos(angle), np.sin(angle)
  want = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
  assert contract.relative_error(got, want) <= contract.tolerance(jnp.float32, 1)


YARN = {"rule": "yarn", "factor": 8.0, "slow_turns": 0.5, "fast_turns": 2.0, "magnitude": 1.3}
YARN |= {"original_length": 26, "whole_pairs": True}


# The pairs, of 4, that turn twice and half a time in 26 tokens: between 1 and 2, and 3 and 4.
TWICE, HALF = (4 * np.log(26 / (2 * np.pi * turns)) / np.log(15) for turns in (2, 0.5))


@pytest.mark.parametrize(
  ("changes", "kept"),
  [
    ({}, [1, 1, 2 / 3, 1 / 3]),
    ({"whole_pairs": False}, [1, 1, (HALF - 2) / (HALF - TWICE), (HALF - 3) / (HALF - TWICE)]),
    ({"fast_turns": 20.0, "slow_turns": 2.0}, [1, 0.5, 0, 0]),  # from the first pair on
    ({"fast_turns": 4.0, "slow_turns": 3.9, "original_length": 24}, [1, 0, 0, 0]),
  ],
)
def test_rotary_embedding_yarn_interpolates_by_pairs(changes, kept):
  base, position, kept = 15.0, 1003, np.array(kept)
  x = X[:, :1]
  got = rotary_embedding(x, jnp.asarray([position]), base, scaling=YARN | changes)
  angle = position * base ** (-np.arange(4) / 4) * (kept + (1 - kept) / 8)
  a, b = np.split(x.astype(np.float64), 2, axis=-1)
  cos, sin = 1.3 * np.cos(angle), 1.3 * np.sin(angle)
  want = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
  assert contract.relative_error(got, want) <= contract.tolerance(jnp.float32, 1)


def test_rotary_embedding_dynamic_changes_nothing_up_to_its_length():
  scaling = {"rule": "dynamic", "factor": 4.0, "original_length": T}
  got = rotary_embedding(X, np.arange(T), scaling=scaling)
  np.testing.assert_array_equal(got, rotary_embedding(X, np.arange(T)))


@pytest.mark.slow
def test_rotary_embedding_products_depend_on_relative_positions():
  q, k = X[:, :1], X[:, 1:2]
  score = lambda i, j: np.sum(
    rotary_embedding(q, jnp.asarray([i])) * rotary_embedding(k, jnp.asarray([j])), axis=-1
  )
  np.testing.assert_allclose(score(100_007, 100_000), score(7, 0), atol=1e-5)
  assert np.abs(score(7, 0) - score(6, 0)).max() > 0.1


def test_rotary_embedding_positions_may_be_shared_negative_or_fractional():
  shared = np.arange(T)
  rows = np.broadcast_to(shared, (B, T))
  np.testing.assert_array_equal(rotary_embedding(X, shared), rotary_embedding(X, rows))
  for positions in (rows - 3, rows / 4):
    want = formula(X, positions, 10000, K, False)
    assert contract.relative_error(rotary_embedding(X, positions), want) <= contract.tolerance(
      jnp.float32, 1
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rotary_embedding_dtypes_and_gradients(dtype):
  x = jnp.asarray(X, dtype)
  out, vjp = jax.vjp(lambda x: rotary_embedding(x, np.arange(T)), x)
  assert out.dtype == dtype
  # A rotation is undone by its transpose.
  assert contract.relative_error(vjp(out)[0], x) <= contract.tolerance(dtype, 1)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"x": X[0]}, r"x has shape \(6, 3, 8\)"),
    ({"x": X.astype(np.int32)}, "x has dtype int32"),
    ({"positions": np.arange(5)}, r"positions has shape \(5,\), but \[T\] = \[6\]"),
    ({"positions": np.zeros((3, T))}, r"positions has shape \(3, 6\)"),
    ({"base": 0}, "base=0 must be a positive"),
    ({"width": 3}, "width=3 must be even and between 2 and K=8"),
    ({"width": 10}, "width=10 must be even"),
    ({"scaling": {"rule": "longrope"}}, "needs a 'rule', one of 'linear', 'llama3', 'yarn'"),
    ({"scaling": YARN | {"fast_turns": 0.5}}, "slow_turns=0.5 must be less than fast_turns=0.5"),
    ({"scaling": YARN | {"whole_pairs": 1}}, "whole_pairs=1 must be True or False"),
    ({"scaling": YARN, "base": 1}, "base=1.0 must be above 1 for the scaling 'yarn'"),
    ({"scaling": {"rule": "linear"}}, "must have exactly 'rule', 'factor'"),
    ({"scaling": {"rule": "linear", "factor": 0}}, "factor=0 must be a positive number"),
    ({"scaling": LLAMA3 | {"low_frequency_factor": 4}}, "low_frequency_factor=4 must be less"),
  ],
)
def test_rotary_embedding_bad_argument_raises_naming_it(arguments, message):
  with pytest.raises(ValueError, match=message):
    rotary_embedding(**({"x": X, "positions": np.arange(T)} | arguments))

"""One token's update of the WKV-4 state for 128 channels, in registers.

Nothing here branches, so that the compiler can interleave tokens: a division would.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.core import channel_grid as grid
from pallas_kernels.core.compensated_sum import CompensatedSum, fast_two_sum
from pallas_kernels.core.wgmma import Backend

EMPTY_MAX = -1e38  # the maximum of an empty state
_LOG2_E = 1.4426950408889634
# ln 2 in two parts: a product of the first with a small whole number is exact in float32.
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440054690583e-4
_ROUNDS = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to the nearest whole number
_MIN_EXPONENT = -104.0  # exp of less is 0 in float32


StateRows = tuple[jax.Array, jax.Array, jax.Array]  # (max, numerator, denominator)


class State(NamedTuple):
  """Two sums divided by exp(max)."""

  max: jax.Array
  numerator: CompensatedSum
  denominator: CompensatedSum

  @classmethod
  def of_rows(cls, maximum, numerator, denominator) -> "State":
    """A state from memory, where its sums have no low part."""
    zero = grid.full_row(0.0)
    return cls(maximum, CompensatedSum(numerator, zero), CompensatedSum(denominator, zero))

  @classmethod
  def empty(cls) -> "State":
    """The state before the first token of a document."""
    zero = grid.full_row(0.0)
    return cls(grid.full_row(EMPTY_MAX), CompensatedSum(zero, zero), CompensatedSum(zero, zero))

  def rows(self):
    """The rows that memory holds: (max, numerator, denominator)."""
    return self.max, self.numerator.high, self.denominator.high


class Factor(NamedTuple):
  """exp of a number: 1 + rest if `near`, otherwise rest. Near 1 the 1 is exact."""

  near: jax.Array
  rest: jax.Array

  def near_part(self, tree):
    """The part of exp(.) x that needs no product, for every x of a tree."""
    zero = grid.full_row(0.0)
    return jax.tree.map(lambda x: jnp.where(self.near, x, zero), tree)


class Change(NamedTuple):
  """How a token changes the state: by a factor, and by `weight` times its value."""

  factor: Factor
  weight: jax.Array


def read_weights(state: State, k, bonus, backend: Backend):
  """Weights of the state and of the token's value in the output, the larger of them 1."""
  log_odds = (k - state.max) + bonus
  smaller = jnp.exp(-jnp.abs(log_odds))
  one = grid.full_row(1.0)
  mostly_present = log_odds > 0.0
  weights = jnp.where(mostly_present, smaller, one), jnp.where(mostly_present, one, smaller)
  return backend.materialize(weights)


def advance(state: State, k, v, decay_rate, backend: Backend) -> tuple[State, Change]:
  """The state after a token."""
  maximum = jnp.maximum(state.max - decay_rate, jnp.maximum(k, EMPTY_MAX))
  # In this order: a difference of neighboring maxima is nearly exact.
  factor = factor_of((state.max - maximum) - decay_rate, backend)
  factor, weight = backend.materialize((factor, jnp.exp(k - maximum)))
  numerator = decayed_sum(factor, state.numerator, weight * v)
  denominator = decayed_sum(factor, state.denominator, weight)
  return State(maximum, numerator, denominator), Change(factor, weight)


def factor_of(x, backend: Backend) -> Factor:
  """exp(x) for x that is at most a little above 0."""
  x = jnp.maximum(x, _MIN_EXPONENT)
  # XLA would fold the two constants.
  whole = backend.materialize(x * _LOG2_E + _ROUNDS) - _ROUNDS
  r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW  # at most ln(2) / 2
  series = r * (1.0 / 5040) + 1.0 / 720
  for factorial in (120, 24, 6, 2, 1):
    series = series * r + 1.0 / factorial
  power = jnp.exp2(whole)
  near = whole == 0.0
  return Factor(near, power * (series * r) + jnp.where(near, 0.0, power))


def decayed_sum(factor: Factor, total: CompensatedSum, x) -> CompensatedSum:
  """factor * total + x."""
  kept, kept_low = factor.near_part(total)
  return fast_two_sum(kept, (factor.rest * total.high + x) + kept_low)


def reciprocal(x, backend: Backend):
  """1 / x for x > 0, to a rounding or two."""
  root = jax.lax.rsqrt(x)
  guess = root * root
  return backend.materialize(guess + guess * (1.0 - x * guess))


def mean(state: State, backend: Backend):
  """numerator / denominator, and 0 for an empty state."""
  zero = grid.full_row(0.0)
  total = state.denominator.high
  there = total > 0.0
  safe = jnp.where(there, total, grid.full_row(1.0))
  return jnp.where(there, state.numerator.high * reciprocal(safe, backend), zero)

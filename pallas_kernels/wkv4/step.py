"""One step of RWKV-4's scan for 128 channels, in registers.

Nothing here branches, so that the compiler can interleave steps: a division would.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import channels

EMPTY = -1e38  # an empty state's maximum
_LOG2_E = 1.4426950408889634
# ln 2 in two parts: a product of the first with a small whole number is exact in float32.
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440054690583e-4
_ROUNDS = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to the nearest whole number
_SMALLEST = -104.0  # exp of less is 0 in float32


class State(NamedTuple):
  """Two sums divided by exp(max), each with what its last rounding lost."""

  max: jax.Array
  numerator: jax.Array
  denominator: jax.Array
  numerator_low: jax.Array
  denominator_low: jax.Array


def state_of(maximum, numerator, denominator) -> State:
  """A state whose sums have lost nothing."""
  nothing = channels.full(0.0)
  return State(maximum, numerator, denominator, nothing, nothing)


def empty_state() -> State:
  """The state before the first step."""
  nothing = channels.full(0.0)
  return State(channels.full(EMPTY), nothing, nothing, nothing, nothing)


class Factor(NamedTuple):
  """exp of a number: 1 + rest if `near`, otherwise rest. Near 1 the 1 is exact."""

  near: jax.Array
  rest: jax.Array


class Change(NamedTuple):
  """How a step changes the state: by a factor, and by `weight` times its value."""

  factor: Factor
  weight: jax.Array


def unless(flag, tree, otherwise):
  """`otherwise` where `flag`, by selection: what is not finite does not pass."""
  if flag is None:
    return tree
  return jax.tree.map(lambda x, y: jnp.where(flag, y, x), tree, otherwise)


def read_weights(state, k, bonus, interpret):
  """Weights of the state and of the present value in the output, the larger of them 1."""
  log_odds = (k - state.max) + bonus
  smaller = jnp.exp(-jnp.abs(log_odds))
  one = channels.full(1.0)
  mostly_present = log_odds > 0.0
  weights = jnp.where(mostly_present, smaller, one), jnp.where(mostly_present, one, smaller)
  return channels.computed(weights, interpret)


def advance(state, k, v, rate, interpret) -> tuple[State, Change]:
  """The state after a step."""
  maximum = jnp.maximum(state.max - rate, jnp.maximum(k, EMPTY))
  # In this order: a difference of neighbouring maxima is nearly exact.
  factor = factor_of((state.max - maximum) - rate, interpret)
  factor, weight = channels.computed((factor, jnp.exp(k - maximum)), interpret)
  numerator = decayed_sum(factor, state.numerator, state.numerator_low, weight * v)
  denominator = decayed_sum(factor, state.denominator, state.denominator_low, weight)
  state = State(maximum, numerator[0], denominator[0], numerator[1], denominator[1])
  return state, Change(factor, weight)


def factor_of(x, interpret) -> Factor:
  """exp(x) for x that is at most a little above 0."""
  x = jnp.maximum(x, _SMALLEST)
  # XLA would take the two constants together.
  whole = channels.computed(x * _LOG2_E + _ROUNDS, interpret) - _ROUNDS
  r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW  # at most ln(2) / 2
  series = r * (1.0 / 5040) + 1.0 / 720
  for factorial in (120, 24, 6, 2, 1):
    series = series * r + 1.0 / factorial
  power = jnp.exp2(whole)
  near = whole == 0.0
  return Factor(near, power * (series * r) + jnp.where(near, 0.0, power))


def decayed_sum(factor, high, low, x):
  """factor * (high + low) + x, as a sum and what its rounding lost (Kahan 1965)."""
  nothing = channels.full(0.0)
  kept, kept_low = jnp.where(factor.near, high, nothing), jnp.where(factor.near, low, nothing)
  return exact_sum(kept, (factor.rest * high + x) + kept_low)


def exact_sum(high, x):
  """high + x, and what the rounding lost."""
  total = high + x
  return total, (high - total) + x


def reciprocal(x, interpret):
  """1 / x for x > 0, to a rounding or two."""
  root = jax.lax.rsqrt(x)
  guess = root * root
  return channels.computed(guess + guess * (1.0 - x * guess), interpret)


def mean(state, interpret):
  """numerator / denominator, and 0 for an empty state."""
  nothing = channels.full(0.0)
  there = state.denominator > 0.0
  safe = jnp.where(there, state.denominator, channels.full(1.0))
  return jnp.where(there, state.numerator * reciprocal(safe, interpret), nothing)

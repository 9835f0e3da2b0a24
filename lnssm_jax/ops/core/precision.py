"""Precision: accumulation dtypes, accurate products and decays, and double-float arithmetic."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def accumulation_dtype(*arrays) -> jnp.dtype:
  """float32, or float64 when an input is float64: the dtype of states, decays and sums."""
  return jnp.result_type(jnp.float32, *(jnp.result_type(array) for array in arrays))


def wide(x: jax.Array) -> jax.Array:
  """x in its accumulation dtype: float32, or float64 if x is."""
  return x.astype(accumulation_dtype(x))


def widen(*arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Each array in its own accumulation dtype."""
  return tuple(wide(x) for x in arrays)


def product(equation: str, left: jax.Array, right: jax.Array, dtype) -> jax.Array:
  """`jnp.einsum` of operands rounded to `dtype`, with sums in float32 (float64 for float64).

  float32 operands are multiplied at full accuracy. float16 operands are widened to float32, for
  states and features may exceed its range.
  """
  if jnp.dtype(dtype) == jnp.float16:
    dtype = jnp.float32
  wide = jnp.result_type(jnp.float32, dtype)
  precision = jax.lax.Precision.HIGHEST if dtype == wide else None
  left, right = left.astype(dtype), right.astype(dtype)
  return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=wide)


def decayed(log_decay: jax.Array, x: jax.Array) -> jax.Array:
  """`exp(log_decay) * x`, with one rounding where the decay is near 1; -inf is exact.

  exp(-1e-5) rounded to float32 is wrong by up to 0.3 % of the 1e-5, and by the same amount in every
  chunk of a constant decay: over many chunks that adds up. `expm1` has all digits of what is lost.
  """
  weak = log_decay > -0.5
  return jnp.where(weak, x, 0.0) + jnp.where(weak, jnp.expm1(log_decay), jnp.exp(log_decay)) * x


class CompensatedSum(NamedTuple):
  """A running sum, and what its last addition lost by rounding (Kahan 1965)."""

  high: jax.Array
  low: jax.Array

  def add(self, x: jax.Array) -> "CompensatedSum":
    """The sum with x."""
    x = x + self.low
    high = self.high + x
    return CompensatedSum(high, (self.high - high) + x)


# Double-float arithmetic (Dekker 1971): a sum of two floats, unevaluated, has twice the digits.


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(s, e): s + e = a + b exactly."""
  total = a + b
  part = total - a
  return total, (a - (total - part)) + (b - part)


def two_product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(p, e): p + e = a b exactly."""
  # The barrier keeps the compiler from contracting p's product into the sum that measures its
  # error.
  product = jax.lax.optimization_barrier(a * b)
  (a_1, a_2), (b_1, b_2) = _halves(a), _halves(b)
  return product, ((a_1 * b_1 - product) + a_1 * b_2 + a_2 * b_1) + a_2 * b_2


def _halves(a):
  """Two numbers of half the digits each, whose sum is a."""
  digits = jnp.finfo(a.dtype).nmant + 1
  shifted = jax.lax.optimization_barrier(a * (2.0 ** -(-digits // 2) + 1))
  high = shifted - (shifted - a)
  return high, a - high


def binary_powers(d: jax.Array, count: int) -> list[jax.Array]:
  """d, d^2, d^4, ..., `count` of them, each within a few roundings. Real or complex.

  Squaring doubles a relative error: after k squarings of floats, d^(2^k) is wrong by 2^k roundings,
  all of one sign. Here the powers are squared in double-float arithmetic.
  """
  if count == 0:
    return []
  power, powers = _to_pairs(d), [d]
  for _ in range(count - 1):
    power = _square(power)
    powers.append(_from_pairs(power, d))
  return powers


# A number is a tuple of its real and, for complex numbers, its imaginary part; each part is a pair
# (high, low) whose sum it is.


def _to_pairs(d):
  parts = (d.real, d.imag) if jnp.issubdtype(d.dtype, jnp.complexfloating) else (d,)
  return tuple((part, jnp.zeros_like(part)) for part in parts)


def _from_pairs(number, like):
  highs = [high for high, _ in number]
  return (jax.lax.complex(*highs) if len(highs) == 2 else highs[0]).astype(like.dtype)


def _square(x):
  if len(x) == 1:
    return (_pair_product(x[0], x[0]),)
  a, b = x
  minus_bb = tuple(-part for part in _pair_product(b, b))
  real = _pair_sum(_pair_product(a, a), minus_bb)
  return real, _pair_sum(_pair_product(a, b), _pair_product(b, a))


def _pair_sum(x, y):
  high, low = two_sum(x[0], y[0])
  return _normalized(high, low + (x[1] + y[1]))


def _pair_product(x, y):
  high, low = two_product(x[0], y[0])
  return _normalized(high, low + (x[0] * y[1] + x[1] * y[0]))


def _normalized(high, low):
  total = high + low
  return total, low - (total - high)

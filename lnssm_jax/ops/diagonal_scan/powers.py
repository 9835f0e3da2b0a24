"""Powers of a constant decay to the last digit.

Squaring doubles a relative error: after k squarings, d^(2^k) is wrong by 2^k roundings, all of one
sign. Over 1000 steps of a weak decay that is an error of 1000 roundings. Here each power is carried
as an unevaluated sum of two floats, whose arithmetic (Dekker 1971) is exact to about twice the
digits.
"""

import jax
import jax.numpy as jnp


def binary_powers(d: jax.Array, count: int) -> list[jax.Array]:
  """d, d^2, d^4, ..., `count` of them, each within a few roundings. Real or complex."""
  if count == 0:
    return []
  power, powers = _from(d), [d]
  for _ in range(count - 1):
    power = _times(power, power)
    powers.append(_value(power, d))
  return powers


def power_table(d: jax.Array, count: int) -> jax.Array:
  """[count, ...]: d^0, d^1, ..., d^(count-1), each within a few roundings. Real or complex."""
  ones = jnp.ones((1, *d.shape), d.dtype)
  table, power = _from(ones), _from(d[None])
  while table[0][0].shape[0] < count:
    longer = _times(table, power)
    table = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), table, longer)
    power = _times(power, power)
  return _value(table, d)[:count]


# A number is a tuple of its real and, for complex numbers, its imaginary part; each part is a pair
# (high, low) whose sum it is.


def _from(d):
  parts = (d.real, d.imag) if jnp.issubdtype(d.dtype, jnp.complexfloating) else (d,)
  return tuple((part, jnp.zeros_like(part)) for part in parts)


def _value(number, like):
  highs = [high for high, _ in number]
  return (jax.lax.complex(*highs) if len(highs) == 2 else highs[0]).astype(like.dtype)


def _times(x, y):
  if len(x) == 1:
    return (_product(x[0], y[0]),)
  (a, b), (c, d) = x, y
  minus_bd = tuple(-part for part in _product(b, d))
  return _sum(_product(a, c), minus_bd), _sum(_product(a, d), _product(b, c))


def _sum(x, y):
  high, low = exact_sum(x[0], y[0])
  return _normal(high, low + (x[1] + y[1]))


def _product(x, y):
  high, low = exact_product(x[0], y[0])
  return _normal(high, low + (x[0] * y[1] + x[1] * y[0]))


def _normal(high, low):
  total = high + low
  return total, low - (total - high)


def exact_sum(a, b):
  """(s, e): s + e = a + b exactly."""
  total = a + b
  part = total - a
  return total, (a - (total - part)) + (b - part)


def exact_product(a, b):
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

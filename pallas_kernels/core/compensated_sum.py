"""Long float32 sums in registers that keep what each addition rounds away (Kahan 1965)."""

from typing import NamedTuple

import jax


class CompensatedSum(NamedTuple):
  """A sum is `high + low`; `low` is the rounding error of the last addition."""

  high: jax.Array
  low: jax.Array


def fast_two_sum(high: jax.Array, x: jax.Array) -> CompensatedSum:
  """high + x and its rounding error, which is exact where |high| >= |x| (Dekker 1971)."""
  total = high + x
  return CompensatedSum(total, (high - total) + x)

"""The state that RWKV-4's scan carries along time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# An empty state's maximum. Finite, so that no difference of two of them is a NaN, and far enough
# down that exp(EMPTY - anything) is exactly 0.
EMPTY = -1e38


class WKV4State(NamedTuple):
  """Two decayed sums, both divided by exp(max). float32 (float64 for float64 inputs).

  The sums of exp(k) v and of exp(k) are exp(max) numerator and exp(max) denominator. `max` is a
  scale, not a quantity: two states are the same if these products are.
  """

  max: jax.Array  # [B, D]
  numerator: jax.Array  # [B, D]
  denominator: jax.Array  # [B, D]


def empty_state(batch: int, width: int, dtype) -> WKV4State:
  """The state before the first step: no token seen, [B, D] each, in `dtype`."""
  zeros = jnp.zeros((batch, width), dtype)
  return WKV4State(jnp.full_like(zeros, EMPTY), zeros, zeros)

"""Dropout of attention's weights in the kernels: `ops.core.dropout`, a tile at a time.

Which weights are dropped is a function of the query's key and of the position of the key token in
its document. So each kernel computes the factors again, and none stands in memory.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA


class Dropout(NamedTuple):
  """Masks, as functions of these. All int32; the words are the bits of uint32."""

  words: Any  # ([B, H, T], [B, H, T]): the key of each query, for Threefry
  start: Any  # [B, T]: position 0 of a query's document is this number of the keys
  position: Any  # [B, S]: of a key in its document


def mask(
  words: tuple[jax.Array, ...], number: jax.Array, rate: float
) -> Callable[[jax.Array], jax.Array]:
  """x -> x, 0 with the probability `rate` and else divided by 1 - rate.

  Args:
    words: two arrays of the shape of x, keys of the queries.
    number: positions of the keys, of the shape of x.
  """
  # As `multipliers` compares 24 bits in float32.
  least = math.ceil(float(np.float32(rate)) * 2**24)
  kept = lax.shift_right_logical(_threefry(words, number), jnp.int32(8)) >= least
  return lambda x: jnp.where(kept, x * (1 / (1 - rate)), 0.0)


def _threefry(words: tuple[jax.Array, ...], number: jax.Array) -> jax.Array:
  """The first word of Threefry-2x32 with 20 rounds (Salmon et al. 2011) of the counter (0, number),
  whose two words are those of `jax.random.fold_in`."""
  first, second = words
  keys = first, second, first ^ second ^ jnp.int32(_PARITY)
  x, y = first, number + second
  for group in range(5):
    for distance in _ROTATIONS[group % 2]:
      x = x + y
      left = lax.shift_left(y, jnp.int32(distance))
      y = (left | lax.shift_right_logical(y, jnp.int32(32 - distance))) ^ x
    x = x + keys[(group + 1) % 3]
    y = y + keys[(group + 2) % 3] + jnp.int32(group + 1)
  return x

"""Scans over time by spans of 1, 2, 4, ... tokens, which no document boundary lies in.

They are for small arrays: a scan is log2(T) passes. `jax.lax.associative_scan` takes fewer, but a
scan of pairs of arrays crashes XLA's compiler for CPUs in its gradient inside `jax.shard_map`
(jaxlib 0.11.2), and documents need a pair.
"""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.segments import Segments, positions


def reach(segments: Segments | None, like: jax.Array) -> jax.Array:
  """How many tokens of its document are before each token of this row, [B, T, 1, ...] as `like`."""
  B, T = like.shape[:2]
  return positions(segments, B, T).reshape(B, T, *[1] * (like.ndim - 2))


def earlier(x: jax.Array, span: int, reach: jax.Array, fill: float) -> jax.Array:
  """x [B, T, ...] `span` tokens earlier; `fill` where that is another document, or none."""
  shifted = jnp.concatenate([x[:, :span], x[:, :-span]], axis=1)
  return jnp.where(reach >= span, shifted, fill)


def spans(length: int) -> list[int]:
  """1, 2, 4, ... below `length`."""
  return [2**n for n in range((length - 1).bit_length())]

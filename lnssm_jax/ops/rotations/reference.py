"""Rotations by running angles as written, for XLA to fuse."""

import math

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.rotations.types import Inputs, Options

# 2 pi in two parts. The first has few digits, so that whole turns of it are subtracted exactly.
_TURN = (6.28125, 2 * math.pi - 6.28125)


def within_a_turn(angle: jax.Array) -> jax.Array:
  """The angle modulo whole turns, which cost digits."""
  turns = jnp.round(angle / sum(_TURN))
  return (angle - turns * _TURN[0]) - turns * _TURN[1]


def rotate(x: jax.Array, angle: jax.Array) -> jax.Array:
  """Rotates the pairs (i, i + A) of the first 2 A channels of x [..., N] by angle [..., A]."""
  A = angle.shape[-1]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b, rest = jnp.split(x, [A, 2 * A], axis=-1)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1)


def rotated(x: jax.Array, offset: jax.Array, angle: jax.Array) -> jax.Array:
  """Shared keys or queries x [..., R, G, N] for all heads [..., R, H, N], by angle [..., H, A]."""
  x = jnp.repeat(x, offset.shape[0] // x.shape[-2], axis=-2)
  return rotate(wide(x) + wide(offset).swapaxes(0, 1), angle[..., None, :, :])


def reference(inputs: Inputs, options: Options) -> tuple[jax.Array, jax.Array]:
  """(Keys, queries) [B, T, R, H, N]."""
  angle = angles(inputs)
  keys = rotated(inputs.keys, inputs.key_offset, angle) * inputs.weight[..., None, :, None]
  queries = rotated(inputs.queries, inputs.query_offset, angle)
  return keys.astype(options.dtype), queries.astype(options.dtype)


def angles(inputs: Inputs) -> jax.Array:
  """The angle of each token, [B, T, H, A]: sums within chunks are products with ones."""
  pace, step, entering, keep = inputs.pace, inputs.step, inputs.entering, inputs.keep
  (B, T, H), (_, L, _, A) = step.shape, entering.shape
  C = T // L
  added = (step[..., None] * pace[:, :, None]).reshape(B, L, C, H * A)
  document = jnp.cumsum(1 - keep.reshape(B, L, C), axis=-1)
  earlier = jnp.tri(C, dtype=bool) & (document[..., :, None] == document[..., None, :])
  ones = earlier.astype(added.dtype)
  sums = jnp.einsum("blts,blsx->bltx", ones, added, precision=jax.lax.Precision.HIGHEST)
  before = jnp.where((document == 0)[..., None, None], entering[:, :, None], 0.0)
  return within_a_turn(sums.reshape(B, L, C, H, A) + before).reshape(B, T, H, A)

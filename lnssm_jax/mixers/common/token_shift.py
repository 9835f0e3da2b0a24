"""Token shift: each token is interpolated with the one before it."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.halo import inputs_before, of_last
from lnssm_jax.ops.core.precision import accumulation_dtype, wide
from lnssm_jax.ops.core.segments import segments_of


def token_shift(
  x: jax.Array,  # [B, T, D]
  previous: jax.Array | None = None,  # [B, D]
  segment_ids: jax.Array | None = None,  # [B, T] integer
  *,
  axis_name: str | None = None,
) -> jax.Array:
  """Returns the token before each token, [B, T, D] in the dtype of x.

  Before the first token stands `previous` (zeros if None); before the first of every later segment,
  zeros. With `axis_name`, x is one device's shard of a sequence over that mesh axis.
  """
  if axis_name is not None:
    first = None if previous is None else previous[:, None]
    previous = inputs_before(x, 1, first, segment_ids, axis_name=axis_name)[:, 0]
  if previous is None:
    previous = jnp.zeros_like(x[:, 0])
  shifted = jnp.concatenate([previous.astype(x.dtype)[:, None], x[:, :-1]], axis=1)
  segments = segments_of("token_shift", segment_ids, *x.shape[:2])
  if segments is None:
    return shifted
  return jnp.where(segments.first()[..., None], jnp.zeros_like(shifted), shifted)


def last_input(x: jax.Array, axis_name: str | None) -> jax.Array:
  """Returns the last token of x [B, T, D], [B, D] in float32 at least.

  With `axis_name`, that of the whole sequence, which is sharded over this mesh axis.
  """
  last = wide(x[:, -1])
  return last if axis_name is None else of_last(last, axis_name=axis_name)


def interpolate(x: jax.Array, shifted: jax.Array, mu: jax.Array) -> jax.Array:
  """mu * x + (1 - mu) * shifted, with mu [D], in float32 at least: the caller rounds it, once."""
  acc = accumulation_dtype(x)
  mu = mu.astype(acc)
  return mu * x.astype(acc) + (1 - mu) * shifted.astype(acc)

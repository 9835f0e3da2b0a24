"""Token shift: each token is interpolated with the one before it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.ops.causal_conv1d.api import token_shift as ops_token_shift
from lnssm_jax.ops.causal_conv1d.types import ConvState
from lnssm_jax.ops.core.halo import inputs_before, of_last
from lnssm_jax.ops.core.precision import wide
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


def interpolated(
  x: jax.Array,  # [B, T, D]
  weights: Sequence[nnx.Param],  # [D] each
  previous: jax.Array | None,  # [B, D]
  segment_ids: jax.Array | None,  # [B, T] integer
  *,
  axis_name: str | None,
  dtype,
) -> tuple[jax.Array, ...]:
  """Returns mu * x + (1 - mu) * (the token before) for each mu of `weights`, [B, T, D] in `dtype`.

  Before the first token and with `axis_name`: as `token_shift`.
  """
  state = None if previous is None else ConvState(previous[:, None])
  mus = [mu[...] for mu in weights]
  options = {"initial_state": state, "segment_ids": segment_ids, "axis_name": axis_name}
  return ops_token_shift(x, mus, dtype=dtype, **options)[0]

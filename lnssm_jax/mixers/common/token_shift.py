"""Token shift: each token is interpolated with the one before it."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.ops.causal_conv1d.api import token_shift as ops_token_shift
from lnssm_jax.ops.causal_conv1d.types import ConvState
from lnssm_jax.ops.core.halo import inputs_before, of_last
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.segments import segments_of
from lnssm_jax.ops.core.spmd import vary_alike


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
  weights: Sequence[nnx.Param | jax.Array],  # [D] each
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


def weighted_streams(
  x: jax.Array,  # [B, T, D]
  shifted: jax.Array,  # [B, T, D]
  weights: tuple[jax.Array, ...],  # S of [D]
  offsets: jax.Array,  # [B, T, S D]
) -> tuple[jax.Array, ...]:
  """x_t + (x_{t-1} - x_t) (weight + offset_t) for each weight and its D columns of `offsets`.

  `shifted` has x_{t-1}. The S results [B, T, D] have the dtype of `offsets`.

  Its gradient is written out for its passes over memory: the gradients of the offsets are written
  once, and those of the weights are their sums. XLA would compute them twice.
  """
  return _weighted_streams(*vary_alike((x, shifted, weights, offsets)))


@jax.custom_vjp
def _weighted_streams(x, shifted, weights, offsets):
  x = wide(x)
  step = wide(shifted) - x
  return tuple(
    (x + step * (wide(weight) + wide(offset))).astype(offset.dtype)
    for weight, offset in zip(weights, jnp.split(offsets, len(weights), axis=-1), strict=True)
  )


def _weighted_streams_forward(*arguments):
  return _weighted_streams(*arguments), arguments


def _weighted_streams_backward(arguments, gradients):
  x, shifted, weights, offsets = arguments
  step = wide(shifted) - wide(x)
  d_offsets = jnp.concatenate([(wide(g) * step).astype(g.dtype) for g in gradients], axis=-1)
  d_offsets = jax.lax.optimization_barrier(d_offsets)
  sums = jnp.sum(wide(d_offsets), axis=tuple(range(d_offsets.ndim - 1)))
  sums = jnp.split(sums, len(weights))
  d_weights = tuple(d.astype(weight.dtype) for weight, d in zip(weights, sums, strict=True))
  total = functools.reduce(jnp.add, map(wide, gradients))
  d_step = functools.reduce(
    jnp.add,
    (
      wide(g) * (wide(weight) + wide(offset))
      for g, weight, offset in zip(
        gradients, weights, jnp.split(offsets, len(weights), axis=-1), strict=True
      )
    ),
  )
  return (total - d_step).astype(x.dtype), d_step.astype(shifted.dtype), d_weights, d_offsets


_weighted_streams.defvjp(_weighted_streams_forward, _weighted_streams_backward)

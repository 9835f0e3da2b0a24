"""The diagonal recurrence token by token: the oracle, run in float64."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.diagonal_scan.types import DiagonalState, Inputs, Options


def reference(inputs: Inputs, options: Options):
  """A `lax.scan` over time."""
  decay, x, state, _ = inputs
  keep = inputs.keep(reverse=options.reverse)
  decay = jnp.broadcast_to(decay, x.shape)
  keep = jnp.ones((*x.shape[:2], 1), bool) if keep is None else keep

  def step(h, token):
    a_t, x_t, keep_t = token
    h = a_t * jnp.where(keep_t, h, 0) + x_t
    return h.astype(state.h.dtype), h.astype(state.h.dtype)

  by_time = [jnp.moveaxis(y, 1, 0) for y in (decay, x, keep)]
  last, h = jax.lax.scan(step, state.h, by_time, reverse=options.reverse)
  return jnp.moveaxis(h, 0, 1).astype(options.out_dtype), DiagonalState(last)

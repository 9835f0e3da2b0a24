"""The diagonal recurrence one step at a time: the oracle. Run it in float64."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.diagonal_scan.state import DiagonalState


def reference(decay, x, state, keep, *, reverse, out_dtype, chunk_size=None):
  """A `lax.scan` over time.

  Arguments as `api.py` has checked them: decay [B, T, D] or [1, 1, D]; x [B, T, D]; state with the
  dtype of the sums; keep [B, T, 1] boolean, False at the steps that forget the state, or None.
  """
  del chunk_size
  decay = jnp.broadcast_to(decay, x.shape)
  keep = jnp.ones((*x.shape[:2], 1), bool) if keep is None else keep

  def step(h, inputs):
    a_t, x_t, keep_t = inputs
    h = a_t * jnp.where(keep_t, h, 0) + x_t
    return h.astype(state.h.dtype), h.astype(state.h.dtype)

  by_time = [jnp.moveaxis(y, 1, 0) for y in (decay, x, keep)]
  last, h = jax.lax.scan(step, state.h, by_time, reverse=reverse)
  return jnp.moveaxis(h, 0, 1).astype(out_dtype), DiagonalState(last)

"""The recurrence token by token, as the mathematics states it: the oracle, run in float64."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.channel_states import Options
from lnssm_jax.ops.selective_scan.types import Inputs, SelectiveState


def reference(inputs: Inputs, options: Options):
  """A `lax.scan` over time."""
  del options
  x, dt, a, b, c, skip, state, segments, *_ = inputs
  first = None if segments is None else segments.first()

  def step(h, token):
    x_t, dt_t, b_t, c_t, first_t = token
    if first_t is not None:
      h = jnp.where(first_t[:, None, None], 0.0, h)
    h = jnp.exp(dt_t[:, :, None] * a) * h + (dt_t * x_t)[:, :, None] * b_t[:, None, :]
    return h, jnp.einsum("bdn,bn->bd", h, c_t, precision="highest") + skip * x_t

  wide = [z.astype(state.h.dtype) for z in (x, dt, b, c)]
  by_time = jax.tree.map(lambda z: jnp.moveaxis(z, 1, 0), (*wide, first))
  h, out = jax.lax.scan(step, state.h, by_time)
  return jnp.moveaxis(out, 0, 1).astype(x.dtype), SelectiveState(h)

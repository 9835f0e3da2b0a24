"""The recurrence token by token, as the mathematics states it: the oracle, run in float64."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.channel_states import Options
from lnssm_jax.ops.longhorn_scan.types import Inputs, LonghornState


def reference(inputs: Inputs, options: Options):
  """A `lax.scan` over time, with the decay as it is defined: in float32 its digits cancel."""
  del options
  x, beta, k, q, skip, state, segments, *_ = inputs
  first = None if segments is None else segments.first()

  def step(h, token):
    x_t, beta_t, k_t, q_t, first_t = token
    if first_t is not None:
      h = jnp.where(first_t[:, None, None], 0.0, h)
    gain = (beta_t / (1 + beta_t * jnp.sum(k_t**2, axis=-1, keepdims=True)))[:, :, None]
    k_t = k_t[:, None, :]
    h = (1 - gain * k_t**2) * h + gain * x_t[:, :, None] * k_t
    return h, jnp.einsum("bdn,bn->bd", h, q_t, precision="highest") + skip * x_t

  wide = [z.astype(state.h.dtype) for z in (x, beta, k, q)]
  by_time = jax.tree.map(lambda z: jnp.moveaxis(z, 1, 0), (*wide, first))
  h, out = jax.lax.scan(step, state.h, by_time)
  return jnp.moveaxis(out, 0, 1).astype(x.dtype), LonghornState(h)

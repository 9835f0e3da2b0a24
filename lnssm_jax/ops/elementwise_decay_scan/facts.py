"""Facts that `elementwise_decay_scan` states: its decay and its recurrence."""

from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.elementwise_decay_scan.types import DecayFunction


def log_decay(arguments: dict[str, Any]) -> jax.Array:
  """As `dispatch.op` wants it."""
  decay = arguments["log_decay"]
  if isinstance(decay, DecayFunction):
    decay = decay.make(decay.steps, decay.parameters)
  return wide(decay)


def recurrence(inputs, _):
  """Likewise."""
  q, k, v, log_decay, weight, *_ = inputs
  T, H, V = v.shape[1:]
  o = jnp.exp(log_decay.make(log_decay.steps, log_decay.parameters)[0])
  o = jnp.broadcast_to(o, (T, *o.shape[1:]))
  if weight is None:
    return {"o": o, "e": k[0], "s": q[0], "u": v[0]}
  # What reads a column is its own, so each is a head.
  read = q[0][..., None] * weight
  columns = lambda z: jnp.moveaxis(z, 3, 2).reshape(T, H * V, -1)
  return {
    "o": columns(o)[..., None],
    "e": jnp.repeat(k[0], V, axis=1),
    "s": columns(read),
    "u": v[0].reshape(T, H * V, 1),
  }

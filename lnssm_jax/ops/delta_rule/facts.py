"""Facts that `delta_rule` states: its decay and its recurrence."""

from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.grouped_heads import with_all_heads
from lnssm_jax.ops.core.precision import wide


def log_decay(arguments: dict[str, Any]) -> jax.Array | None:
  """As `dispatch.op` wants it."""
  per_head = arguments["log_decay"]
  return None if per_head is None else wide(per_head)[..., None]


def recurrence(inputs, options):
  """Likewise."""
  inputs = with_all_heads(inputs)
  by_column = lambda z: jnp.repeat(z, width, axis=1)  # a head for each column of a rate of its own
  v, beta, k = inputs.v[0], inputs.beta[0], inputs.k[0]
  width = beta.shape[-1]
  T, H, V = v.shape
  beta = beta.reshape(T, H * width, 1)
  k, erase, q = (by_column(z) for z in (k, inputs.erase[0], inputs.q[0]))
  erased = (beta * k)[..., None] * erase[..., None, :]
  decay = by_column(jnp.exp(inputs.log_decay[0]))[..., None, None]
  return {
    "o": decay * (jnp.eye(k.shape[-1]) - erased),
    "e": k,
    "s": options.scale * q,
    "u": v.reshape(T, H * width, V // width),
    "rate": beta,
    "product": "matrix",
  }

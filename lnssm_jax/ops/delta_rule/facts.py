"""Facts that `delta_rule` states: its decay and its recurrence."""

from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.grouped_heads import with_all_heads
from lnssm_jax.ops.core.precision import wide


def log_decay(arguments: dict[str, Any]) -> jax.Array | None:
  """As `dispatch.op` wants it."""
  decay = arguments["log_decay"]
  return decay if decay is None or decay.ndim == 4 else wide(decay)[..., None]


def recurrence(inputs, options):
  """Likewise."""
  inputs = with_all_heads(inputs)
  by_column = lambda z: jnp.repeat(z, width, axis=1)  # a head for each column of a rate of its own
  v, beta, k = inputs.v[0], inputs.beta[0], inputs.k[0]
  width = beta.shape[-1]
  T, H, V = v.shape
  beta = beta.reshape(T, H * width, 1)
  k, erase, q = (by_column(z) for z in (k, inputs.erase[0], inputs.q[0]))
  decay = by_column(jnp.exp(inputs.log_decay[0]))
  if not options.erase_before_decay:
    erase = decay * erase
  written = inputs.write_key
  return {
    "o": jnp.eye(k.shape[-1]) * decay[..., None, :] - (beta * k)[..., None] * erase[..., None, :],
    "e": k if written is None else by_column(written[0]),
    "s": options.scale * q,
    "u": v.reshape(T, H * width, V // width),
    "rate": beta,
    "product": "matrix",
  }

"""Facts that `wkv4` states: its decay and its recurrence."""

from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.recurrence import before_the_update, normalized


def log_decay(arguments: dict[str, Any]) -> jax.Array:
  """As `dispatch.op` wants it."""
  return -wide(arguments["decay_rate"])[None]


def recurrence(inputs, _):
  """Likewise."""
  k, v = inputs.k[0], inputs.v[0]
  e = jnp.exp(k - jnp.max(k, axis=0))[..., None]  # a factor per channel cancels in the mean
  o = jnp.exp(-inputs.decay_rate)[None, :, None]
  s, direct = before_the_update(o, e, jnp.ones_like(e), jnp.exp(inputs.bonus)[:, None])
  return normalized({"o": o[..., None], "e": e, "s": s, "u": v[..., None], "direct": direct})

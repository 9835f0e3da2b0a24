"""Facts that `selective_scan` states: its decay and its recurrence."""

from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.selective_scan.types import step_sizes


def log_decay(arguments: dict[str, Any]) -> jax.Array:
  """As `dispatch.op` wants it."""
  dt = step_sizes(*(arguments[name] for name in ("dt", "dt_bias", "dt_softplus"))).values
  return wide(dt)[..., None] * wide(arguments["a"])


def recurrence(inputs, _):
  """Likewise."""
  dt, x = inputs.dt[0], inputs.x[0]
  o = jnp.exp(dt[..., None] * inputs.a)  # [T, D, N]
  e, s = inputs.b[0][:, None], inputs.c[0][:, None]
  streams = {"o": jnp.swapaxes(o, 1, 2)[:, None], "e": e, "s": s, "u": x[:, None]}
  return streams | {"rate": dt[:, None], "direct": inputs.skip}

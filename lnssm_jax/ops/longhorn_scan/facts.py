"""Facts that `longhorn_scan` states: its decay and its recurrence."""

from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.longhorn_scan.gains import gain_and_decay
from lnssm_jax.ops.longhorn_scan.types import strengths


def log_decay(arguments: dict[str, Any]) -> jax.Array:
  """As `dispatch.op` wants it."""
  beta = strengths(*(arguments[name] for name in ("beta", "beta_bias", "beta_sigmoid"))).values
  return jnp.log(gain_and_decay(wide(beta), wide(arguments["k"]))[1])


def recurrence(inputs, _):
  """Likewise."""
  rate, decay = gain_and_decay(inputs.beta[0], inputs.k[0])
  e, s = inputs.k[0][:, None], inputs.q[0][:, None]
  streams = {"o": jnp.swapaxes(decay, 1, 2)[:, None], "e": e, "s": s, "u": inputs.x[0][:, None]}
  return streams | {"rate": rate[:, None], "direct": inputs.skip}

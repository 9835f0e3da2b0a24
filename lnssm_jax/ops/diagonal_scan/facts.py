"""Facts that `diagonal_scan` states: its decay and its recurrence."""

from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import wide


def log_decay(arguments: dict[str, Any]) -> jax.Array:
  """As `dispatch.op` wants it."""
  return jnp.log(wide(jnp.abs(arguments["decay"])))[..., None, :]


def recurrence(inputs, options):
  """Likewise."""
  if options.reverse:
    return "runs from the last token to the first"
  one = jnp.ones((1, 1, 1))
  return {"o": inputs.decay[0][:, None, None], "e": one, "s": one, "u": inputs.x[0][:, None]}

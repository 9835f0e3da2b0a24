"""Facts that `long_convolution` states: its decay and its recurrence."""

from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.long_convolution.types import ExponentialKernel


def log_decay(arguments: dict[str, Any]) -> jax.Array | None:
  """As `dispatch.op` wants it."""
  kernel = arguments["kernel"]
  return wide(jnp.real(kernel.log_pole)) if isinstance(kernel, ExponentialKernel) else None


def recurrence(inputs, _):
  """Likewise."""
  kernel = inputs.kernel
  if not isinstance(kernel, ExponentialKernel):
    return "has free taps: its state is the window of past inputs itself, not sums that decay"
  o, s = jnp.exp(kernel.log_pole), kernel.coefficient  # [D, N]
  if jnp.iscomplexobj(o) or jnp.iscomplexobj(s):  # the real part, as the mean of the conjugates
    o, s = (jnp.concatenate([z, jnp.conj(z)], axis=1) for z in (o, s / 2))
  streams = {"o": o[None, ..., None], "e": jnp.ones_like(s)[None], "s": s[None]}
  direct = 0.0 if kernel.direct is None else kernel.direct[:, None]
  return streams | {"u": inputs.x[0][..., None], "direct": direct}

"""Facts that `linear_attention` states: its decay and its recurrence."""

from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.grouped_heads import with_all_heads
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.recurrence import before_the_update, normalized


def per_key(decay: jax.Array) -> jax.Array:
  """[..., H, K], or [..., H, 1] of one decay per head, of which [H] or [B, T, H] are given."""
  return wide(decay)[..., None] if decay.ndim in (1, 3) else wide(decay)


def log_decay(arguments: dict[str, Any]) -> jax.Array | None:
  """As `dispatch.op` wants it."""
  keys, values = arguments["log_decay"], arguments["value_log_decay"]
  if values is None:
    return None if keys is None else per_key(keys)
  if keys is None:
    return wide(values)
  return per_key(keys)[..., :, None] + wide(values)[..., None, :]


def recurrence(inputs, options):
  """Likewise."""
  if options.rank > 1:
    return "reads several keys per token"
  q, k, v, log_decay, by_value, bonus, _, _, own_weight = with_all_heads(inputs)
  o, e, s, direct = jnp.exp(log_decay[0]), k[0], options.scale * q[0], jnp.zeros((1, 1, 1))
  if bonus is not None:
    if by_value is not None:
      return "reads before the update, with a decay of values"
    s, direct = before_the_update(o, e, s, bonus)
  if own_weight is not None:
    direct = (own_weight[0][..., None] - 1) * jnp.sum(s * e, axis=-1, keepdims=True)
  o = o[..., None] if by_value is None else o[..., None] * jnp.exp(by_value[0])[:, :, None]
  streams = {"o": o, "e": e, "s": s, "u": v[0], "direct": direct}
  return normalized(streams) if options.normalize else streams

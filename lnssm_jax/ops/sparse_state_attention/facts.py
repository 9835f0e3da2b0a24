"""Facts that `sparse_state_attention` states: its decay and its recurrence."""

from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.linear_attention.facts import per_key


def log_decay(arguments: dict[str, Any]) -> jax.Array | None:
  """As `dispatch.op` wants it."""
  given, indices = arguments["log_decay"], arguments["indices"]
  if given is None:
    return None
  B, T, _ = indices.shape
  if by_selection := jnp.ndim(arguments["k"]) == 5 and jnp.ndim(given) >= 4:
    given = wide(given) if given.ndim == 5 else wide(given)[..., None]  # [B, T, S, H, K or 1]
  else:
    given = per_key(given)
    given = jnp.broadcast_to(given, (B, T, *given.shape[-2:]))[:, :, None]
  partitions = jnp.arange(arguments["num_partitions"])
  selected = (indices[..., None] == partitions)[..., None, None]  # [B, T, S, P, 1, 1]
  if not by_selection:
    selected = jnp.any(selected, axis=2, keepdims=True)
  # [B, T, P, H, K]; a sum of which at most one summand is not 0.
  decays = jnp.sum(jnp.where(selected, given[:, :, :, None], 0), axis=2)
  return jnp.moveaxis(decays, 2, 3).reshape(B, T, decays.shape[3], -1)


def recurrence(inputs, options):
  """Each partition as H heads; a token that does not select it leaves them as they are."""
  if inputs.beta is not None:
    return "has the delta rule inside, with a selection"
  N, H = inputs.state.kv.shape[1:3]
  chosen = jax.nn.one_hot(inputs.indices[0], N, dtype=inputs.write.dtype)  # [T, S, N]
  T, S, _ = chosen.shape

  def scattered(z, weight):  # [T, S or 1, H, ...], [T, S] -> [T, N H, ...]
    z = jnp.broadcast_to(z, (T, S, *z.shape[2:]))
    return jnp.einsum("ts,tsn,ts...->tn...", weight, chosen, z).reshape(T, N * H, *z.shape[3:])

  one = jnp.ones((T, S), chosen.dtype)
  log_decay = inputs.log_decay
  log_decay = jnp.zeros((1, 1, H, 1)) if log_decay is None else log_decay[0]
  return {
    "o": jnp.exp(scattered(log_decay, one))[..., None],
    "e": scattered(inputs.k[0], inputs.write[0]),
    "s": options.scale * scattered(inputs.q[0][:, None], inputs.read[0]),
    "u": scattered(inputs.v[0], one),
    "copies": N,
  }

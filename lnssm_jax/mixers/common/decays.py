"""The log decays of a call of an op, whatever its form: per head and channel of the state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops import DecayFunction, ExponentialKernel, OpCall
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.longhorn_scan.gains import gain_and_decay
from lnssm_jax.ops.longhorn_scan.types import strengths
from lnssm_jax.ops.selective_scan.types import step_sizes


def log_decay(call: OpCall) -> jax.Array | None:
  """Log decays [H, K] if they are constant, else [B, T, H, K]; None: the op has no decay.

  A row of the state has one decay: K key channels, or 1 if a head has one decay; where the columns
  of the state decay too, a last axis V follows. A recurrence without heads has H = 1 and its
  channels as K; one with N numbers per channel has its channels as H and N as K. Of a state of
  partitions, those of all are side by side, [B, T, H, partitions * K], 0 where a token does not
  select a partition.

  They are the numbers that the op receives, in float32 at least: where it takes the decay itself,
  their error is that of its rounding.
  """
  return _OF_OP[call.op](call.arguments) if call.op in _OF_OP else None


def _linear_attention(arguments: dict[str, Any]) -> jax.Array | None:
  keys, values = arguments["log_decay"], arguments["value_log_decay"]
  if values is None:
    return None if keys is None else _per_key(keys)
  if keys is None:
    return wide(values)
  return _per_key(keys)[..., :, None] + wide(values)[..., None, :]


def _per_key(decay: jax.Array) -> jax.Array:
  """[..., H, K], or [..., H, 1] of one decay per head, of which [H] or [B, T, H] are given."""
  return wide(decay)[..., None] if decay.ndim in (1, 3) else wide(decay)


def _delta_rule(arguments: dict[str, Any]) -> jax.Array | None:
  per_head = arguments["log_decay"]
  return None if per_head is None else wide(per_head)[..., None]


def _diagonal_scan(arguments: dict[str, Any]) -> jax.Array:
  return jnp.log(wide(jnp.abs(arguments["decay"])))[..., None, :]


def _selective_scan(arguments: dict[str, Any]) -> jax.Array:
  dt = step_sizes(*(arguments[name] for name in ("dt", "dt_bias", "dt_softplus"))).values
  return wide(dt)[..., None] * wide(arguments["a"])


def _longhorn_scan(arguments: dict[str, Any]) -> jax.Array:
  beta = strengths(*(arguments[name] for name in ("beta", "beta_bias", "beta_sigmoid"))).values
  return jnp.log(gain_and_decay(wide(beta), wide(arguments["k"]))[1])


def _wkv4(arguments: dict[str, Any]) -> jax.Array:
  return -wide(arguments["decay_rate"])[None]


def _elementwise_decay_scan(arguments: dict[str, Any]) -> jax.Array:
  decay = arguments["log_decay"]
  if isinstance(decay, DecayFunction):
    decay = decay.make(decay.steps, decay.parameters)
  return wide(decay)


def _long_convolution(arguments: dict[str, Any]) -> jax.Array | None:
  kernel = arguments["kernel"]
  return wide(jnp.real(kernel.log_pole)) if isinstance(kernel, ExponentialKernel) else None


def _sparse_state_attention(arguments: dict[str, Any]) -> jax.Array | None:
  given, indices = arguments["log_decay"], arguments["indices"]
  if given is None:
    return None
  B, T, _ = indices.shape
  if by_selection := jnp.ndim(arguments["k"]) == 5 and jnp.ndim(given) >= 4:
    given = wide(given) if given.ndim == 5 else wide(given)[..., None]  # [B, T, S, H, K or 1]
  else:
    given = _per_key(given)
    given = jnp.broadcast_to(given, (B, T, *given.shape[-2:]))[:, :, None]
  partitions = jnp.arange(arguments["num_partitions"])
  selected = (indices[..., None] == partitions)[..., None, None]  # [B, T, S, P, 1, 1]
  if not by_selection:
    selected = jnp.any(selected, axis=2, keepdims=True)
  # [B, T, P, H, K]; a sum of which at most one summand is not 0.
  decays = jnp.sum(jnp.where(selected, given[:, :, :, None], 0), axis=2)
  return jnp.moveaxis(decays, 2, 3).reshape(B, T, decays.shape[3], -1)


_OF_OP: dict[str, Callable[[dict[str, Any]], jax.Array | None]] = {
  "delta_rule": _delta_rule,
  "diagonal_scan": _diagonal_scan,
  "elementwise_decay_scan": _elementwise_decay_scan,
  "linear_attention": _linear_attention,
  "long_convolution": _long_convolution,
  "longhorn_scan": _longhorn_scan,
  "selective_scan": _selective_scan,
  "sparse_state_attention": _sparse_state_attention,
  "wkv4": _wkv4,
}

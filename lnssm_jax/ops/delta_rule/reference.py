"""The delta rule one token at a time, as mathematics writes it, and as an associative scan."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import accumulation_dtype, decayed
from lnssm_jax.ops.delta_rule.types import DeltaRuleState, Inputs, Options


def reference(inputs: Inputs, options: Options) -> tuple[jax.Array, DeltaRuleState]:
  """A `lax.scan` over time. The oracle: run it in float64."""
  q, k, v, beta, log_decay, _, state, _ = inputs
  acc = accumulation_dtype(q, k, v)

  def step(kv, inputs):
    q_t, k_t, erase_t, v_t, beta_t, a_t, first_t = inputs
    kv = a_t[..., None, None] * jnp.where(first_t[:, None, None, None], 0.0, kv)
    old = jnp.einsum("bhk,bhkv->bhv", erase_t, kv, precision="highest")
    kv = kv + k_t[..., :, None] * (beta_t * (v_t - old))[..., None, :]
    return kv, options.scale * jnp.einsum("bhk,bhkv->bhv", q_t, kv, precision="highest")

  arrays = (x.astype(acc) for x in (q, k, inputs.erase, v, beta))
  by_time = tuple(jnp.moveaxis(x, 1, 0) for x in (*arrays, jnp.exp(log_decay), _first(inputs)))
  kv, out = jax.lax.scan(step, state.kv, by_time)
  return jnp.moveaxis(out, 0, 1).astype(v.dtype), DeltaRuleState(kv)


def associative(inputs: Inputs, options: Options) -> tuple[jax.Array, DeltaRuleState]:
  """`jax.lax.associative_scan` over affine maps of the state: depth log T.

  A run of tokens does S -> exp(g) P S + X, with P the product of the I - beta k e^T. Two runs make
  g = g_1 + g_2, P = P_2 P_1, X = exp(g_2) P_2 X_1 + X_2. Memory [B, T, H, K, K + V], and with one
  rate per value column, each of which has its own P, [B, T, H, V, K, K].
  """
  q, k, v, beta, log_decay, _, state, _ = inputs
  acc = accumulation_dtype(q, k, v)
  product = lambda left, right: jnp.einsum("...ij,...jv->...iv", left, right, precision="highest")
  # [B, T, H, G, ...]: G groups of value columns with one rate each.
  groups = beta.shape[-1]
  group = lambda x: jnp.moveaxis(x.reshape(*x.shape[:-1], groups, -1), -2, -3)
  written = beta[..., None] * k.astype(acc)[..., None, :]  # [B, T, H, G, K]
  erased = written[..., :, None] * inputs.erase.astype(acc)[..., None, None, :]
  kept = jnp.eye(k.shape[-1], dtype=acc) - erased
  added = written[..., :, None] * v.astype(acc).reshape(*v.shape[:-1], groups, 1, -1)
  first = _first(inputs)[:, :, None, None, None, None]
  log_decay = log_decay[..., None, None, None]

  def combine(left, right):
    log_decay_1, kept_1, added_1, first_1 = left
    log_decay_2, kept_2, added_2, first_2 = right
    # At a boundary what came before is left out, not multiplied by zero: it may be infinite.
    carried = jnp.where(first_2, 0.0, decayed(log_decay_2, product(kept_2, added_1)))
    kept = jnp.where(first_2, kept_2, product(kept_2, kept_1))
    return log_decay_1 + log_decay_2, kept, carried + added_2, first_1 | first_2

  elements = (log_decay, kept, added, first)
  log_decay, kept, added, reset = jax.lax.associative_scan(combine, elements, axis=1)
  entered = decayed(log_decay, product(kept, group(state.kv)[:, None]))
  states = jnp.where(reset, 0.0, entered) + added  # [B, T, H, G, K, V / G]
  out = options.scale * jnp.einsum("bthk,bthgkv->bthgv", q.astype(acc), states, precision="highest")
  last = jnp.moveaxis(states[:, -1], -3, -2).reshape(state.kv.shape)
  return out.reshape(v.shape).astype(v.dtype), DeltaRuleState(last)


def _first(inputs):
  """[B, T]: whether the state is reset before a token."""
  segments = inputs.segments
  return jnp.zeros(inputs.q.shape[:2], bool) if segments is None else segments.first()

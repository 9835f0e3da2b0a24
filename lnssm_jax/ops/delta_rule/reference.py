"""The delta rule one token at a time, as mathematics writes it, and as an associative scan."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import accumulation_dtype, decayed
from lnssm_jax.ops.delta_rule.types import DeltaRuleState, Inputs, Options


def reference(inputs: Inputs, options: Options) -> tuple[jax.Array, DeltaRuleState]:
  """A `lax.scan` over time. The oracle: run it in float64."""
  acc = accumulation_dtype(inputs.q, inputs.k, inputs.v)

  def step(kv, token):
    q, k, erase_key, v, beta, decay, write_key, first = token
    before = jnp.where(first[:, None, None, None], 0.0, kv)
    kv = decay[..., None] * before
    read = before if options.erase_before_decay else kv
    old = jnp.einsum("bhk,bhkv->bhv", erase_key, read, precision="highest")
    if write_key is None:
      kv = kv + k[..., None] * (beta * (v - old))[..., None, :]
    else:
      kv = kv + write_key[..., None] * (beta * v)[..., None, :]
      kv = kv - k[..., None] * (beta * old)[..., None, :]
    return kv, options.scale * jnp.einsum("bhk,bhkv->bhv", q, kv, precision="highest")

  arrays = inputs.q, inputs.k, inputs.erase, inputs.v, inputs.beta, jnp.exp(inputs.log_decay)
  arrays = jax.tree.map(lambda x: x.astype(acc), (*arrays, inputs.write_key))
  by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (*arrays, _first(inputs)))
  kv, out = jax.lax.scan(step, inputs.state.kv, by_time)
  return jnp.moveaxis(out, 0, 1).astype(inputs.v.dtype), DeltaRuleState(kv)


def associative(inputs: Inputs, options: Options) -> tuple[jax.Array, DeltaRuleState]:
  """`jax.lax.associative_scan` over affine maps of the state: depth log T.

  A run of tokens does S -> (diag(exp(g)) + R) S + X. With E = diag(exp(g)), two runs make
  g = g_1 + g_2, R = E_2 R_1 + R_2 E_1 + R_2 R_1 and X = E_2 X_1 + R_2 X_1 + X_2. Memory
  [B, T, H, K, K + V], and with one rate per value column, each of which has its own R,
  [B, T, H, V, K, K].
  """
  q, k, v, beta, log_decay, _, write_key, state, _ = inputs
  acc = accumulation_dtype(q, k, v)
  product = lambda left, right: jnp.einsum("...ij,...jv->...iv", left, right, precision="highest")
  # [B, T, H, G, ...]: G groups of value columns with one rate each.
  groups = beta.shape[-1]
  group = lambda x: jnp.moveaxis(x.reshape(*x.shape[:-1], groups, -1), -2, -3)
  rated = lambda key: beta[..., None] * key.astype(acc)[..., None, :]  # [B, T, H, G, K]
  erase = inputs.erase.astype(acc)
  if not options.erase_before_decay:
    erase = erase * jnp.exp(log_decay)
  erased = -rated(k)[..., :, None] * erase[..., None, None, :]
  written = rated(k if write_key is None else write_key)
  added = written[..., :, None] * v.astype(acc).reshape(*v.shape[:-1], groups, 1, -1)
  first = _first(inputs)[:, :, None, None, None, None]
  log_decay = log_decay[..., None, :, None]  # [B, T, H, 1, 1 or K, 1]

  def combine(left, right):
    log_decay_1, erased_1, added_1, first_1 = left
    log_decay_2, erased_2, added_2, first_2 = right
    # At a boundary what came before is left out, not multiplied by zero: it may be infinite.
    passed = lambda x: jnp.where(first_2, 0.0, decayed(log_decay_2, x) + product(erased_2, x))
    erased = passed(erased_1) + decayed(jnp.swapaxes(log_decay_1, -1, -2), erased_2)
    return log_decay_1 + log_decay_2, erased, passed(added_1) + added_2, first_1 | first_2

  elements = (log_decay, erased, added, first)
  log_decay, erased, added, reset = jax.lax.associative_scan(combine, elements, axis=1)
  entering = group(state.kv)[:, None]
  entered = decayed(log_decay, entering) + product(erased, entering)
  states = jnp.where(reset, 0.0, entered) + added  # [B, T, H, G, K, V / G]
  out = options.scale * jnp.einsum("bthk,bthgkv->bthgv", q.astype(acc), states, precision="highest")
  last = jnp.moveaxis(states[:, -1], -3, -2).reshape(state.kv.shape)
  return out.reshape(v.shape).astype(v.dtype), DeltaRuleState(last)


def _first(inputs):
  """[B, T]: whether the state is reset before a token."""
  segments = inputs.segments
  return jnp.zeros(inputs.q.shape[:2], bool) if segments is None else segments.first()

"""RWKV-4's scan one token at a time, as mathematics writes it, and as an associative scan.

A maximum is a scale by which numerator and denominator are divided. Nothing depends on it, so it is
held fixed in differentiation.
"""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.wkv4.types import EMPTY, Inputs, Options, WKV4State


def reference(inputs: Inputs, options: Options) -> tuple[jax.Array, WKV4State]:
  """A `lax.scan` over time. The oracle: run it in float64."""
  del options
  (k, v, decay_rate, bonus, state, _), keep = inputs, inputs.keep
  acc = state.max.dtype
  keep = jnp.ones((*k.shape[:2], 1), bool) if keep is None else keep
  w, u = decay_rate.astype(acc), bonus.astype(acc)

  def step(state, inputs):
    k_t, v_t, keep_t = inputs
    k_t, v_t = k_t.astype(acc), v_t.astype(acc)
    m = jnp.where(keep_t, state.max, EMPTY)
    numerator = jnp.where(keep_t, state.numerator, 0)
    denominator = jnp.where(keep_t, state.denominator, 0)

    past, present = read_weights(k_t, u, m)
    out = (past * numerator + present * v_t) / (past * denominator + present)

    scale = jax.lax.stop_gradient(jnp.maximum(jnp.maximum(m - w, k_t), EMPTY))
    # In this order: m - scale is nearly exact, so that the rounding of `scale` does no harm.
    past, present = jnp.exp((m - scale) - w), jnp.exp(k_t - scale)
    state = WKV4State(scale, past * numerator + present * v_t, past * denominator + present)
    return state, out

  by_time = [jnp.moveaxis(x, 1, 0) for x in (k, v, keep)]
  state, out = jax.lax.scan(step, state, by_time)
  return jnp.moveaxis(out, 0, 1).astype(v.dtype), state


def associative_elements(k, v, decay_rate, bonus, state, keep):
  """`jax.lax.associative_scan` over (decay, max, numerator, denominator): depth log T."""
  acc, out_dtype = state.max.dtype, v.dtype
  keep = jnp.ones((*k.shape[:2], 1), bool) if keep is None else keep
  k, v, w, u = (x.astype(acc) for x in (k, v, decay_rate, bonus))

  def combine(left, right):
    keep_1, decay_1, m_1, *sums_1 = left
    keep_2, decay_2, m_2, *sums_2 = right
    m_1 = jnp.where(keep_2, m_1, EMPTY)
    scale = jax.lax.stop_gradient(jnp.maximum(jnp.maximum(m_1 - decay_2, m_2), EMPTY))
    past, present = jnp.exp((m_1 - scale) - decay_2), jnp.exp(m_2 - scale)
    sums = (
      jnp.where(keep_2, past * x, 0) + present * y for x, y in zip(sums_1, sums_2, strict=True)
    )
    return keep_1 & keep_2, decay_1 + decay_2, scale, *sums

  # A token is the state (k, v, 1), decayed by w; one that k = -inf leaves out is an empty state.
  there = k > EMPTY
  step = WKV4State(jnp.where(there, k, EMPTY), jnp.where(there, v, 0), there.astype(acc))
  before = lambda first, x: jnp.concatenate([first[:, None], x], axis=1)
  elements = (
    before(jnp.ones_like(keep[:, 0]), keep),
    before(jnp.zeros_like(state.max), jnp.broadcast_to(w, k.shape)),
    *(before(x, y) for x, y in zip(state, step, strict=True)),
  )
  _, _, *states = jax.lax.associative_scan(combine, elements, axis=1)
  m, numerator, denominator = (x[:, :-1] for x in states)
  m = jnp.where(keep, m, EMPTY)
  past, present = read_weights(k, u, m)
  sums = [jnp.where(keep, past * x, 0) for x in (numerator, denominator)]
  out = (sums[0] + present * v) / (sums[1] + present)
  return out.astype(out_dtype), WKV4State(*(x[:, -1] for x in states))


def read_weights(k, bonus, m):
  """Weights of the state and of the present value in the output, the larger of them 1."""
  # A difference first: bonus + k would lose the digits of `bonus` next to a large k.
  log_odds = (k - m) + bonus
  return jnp.exp(jnp.minimum(-log_odds, 0)), jnp.exp(jnp.minimum(log_odds, 0))

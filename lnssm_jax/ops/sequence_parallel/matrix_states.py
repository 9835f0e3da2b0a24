"""Scans with a matrix for a state, on a sequence whose steps are divided over devices.

Every function runs inside `jax.shard_map` on one device's part of the steps, and is the function of
the same name in `lnssm_jax.ops` on the whole sequence. `initial_state` and the returned state are
those of the whole sequence, the same on all devices. With `axis_name=None` it is the function in
`lnssm_jax.ops`. README.md beside this file derives the summaries.
"""

import functools

import jax
import jax.numpy as jnp

from lnssm_jax import ops
from lnssm_jax.ops import dispatch
from lnssm_jax.ops.decays import decayed
from lnssm_jax.ops.delta_rule.state import DeltaRuleState
from lnssm_jax.ops.elementwise_decay_scan.state import DecayFunction, ElementwiseDecayState
from lnssm_jax.ops.linear_attention.state import LinearAttentionState
from lnssm_jax.ops.products import product
from lnssm_jax.ops.sequence_parallel.exchange import initial_or_zeros, states


def linear_attention(
  q: jax.Array,  # [B, T, H, K]
  k: jax.Array,  # [B, T, H, K]
  v: jax.Array,  # [B, T, H, V]
  *,
  axis_name: str | None,
  log_decay: jax.Array | None = None,  # [H], [H, K], [B, T, H] or [B, T, H, K], values <= 0
  value_log_decay: jax.Array | None = None,  # [H, V] or [B, T, H, V], values <= 0
  bonus: jax.Array | None = None,  # [H, K]
  normalize: bool = False,
  scale: float = 1.0,
  initial_state: LinearAttentionState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, LinearAttentionState]:
  """`ops.linear_attention` on a divided sequence.

  A part's summary is one matrix product of all its keys, decayed to its end, with its values. The
  exchange has B H (K V + K) numbers and the sums of the decays.

  Raises:
    ValueError, NotImplementedError: as `ops.linear_attention`; ValueError: `axis_name` is not a
      mapped axis.
  """
  run = functools.partial(
    ops.linear_attention,
    q,
    k,
    v,
    log_decay=log_decay,
    value_log_decay=value_log_decay,
    bonus=bonus,
    normalize=normalize,
    scale=scale,
    segment_ids=segment_ids,
    implementation=implementation,
    chunk_size=chunk_size,
  )
  if axis_name is None:
    return run(initial_state=initial_state)
  (_, k, v, log_decay, value_log_decay, _, state, segments), _ = dispatch.checked(
    ops.linear_attention,
    q,
    k,
    v,
    log_decay=log_decay,
    value_log_decay=value_log_decay,
    bonus=bonus,
    normalize=normalize,
    scale=scale,
    initial_state=initial_state,
    segment_ids=segment_ids,
  )
  acc, T = state.kv.dtype, k.shape[1]
  total, after = _sums(log_decay.astype(acc), T)
  last = None if segments is None else (segments == segments[:, -1:])[:, :, None, None]
  weighted = lambda x, after: x.astype(acc) * jnp.exp(after)
  keys = weighted(k, after)
  keys = keys if last is None else jnp.where(last, keys, 0)
  values, value_total = v, None
  if value_log_decay is not None:
    value_total, after = _sums(value_log_decay.astype(acc), T)
    values = weighted(v, after)
    value_total = value_total[..., None, :]
  added = product("bthk,bthv->bhkv", keys, values, v.dtype)
  key_sum = keys.sum(1) if normalize else None

  def advance(summary, state):
    added, total, value_total = summary
    kv = decayed(total[..., None], state.kv)
    kv = kv if value_total is None else decayed(value_total, kv)
    key_sum = None if added.key_sum is None else decayed(total, state.key_sum) + added.key_sum
    return LinearAttentionState(kv + added.kv, key_sum)

  summary = (LinearAttentionState(added, key_sum), total, value_total)
  kind = lambda s: LinearAttentionState(s.kv, s.key_sum if normalize else None)
  initial = initial_or_zeros(None if initial_state is None else kind(initial_state), kind(state))
  entering, final = states(axis_name, summary, initial, advance, segment_ids)
  return run(initial_state=entering)[0], final


def _sums(log_decay, length):
  """[B|1, H, X|1] of all steps; [B|1, T, H, X|1] of those after each step. One sign throughout."""
  if log_decay.shape[1] == 1:  # the same at every step; 0 times -inf is left out
    steps = jnp.arange(length - 1, -1, -1, dtype=log_decay.dtype)[None, :, None, None]
    after = jnp.where(steps > 0, steps * log_decay, 0.0)
    return length * log_decay[:, 0], after
  from_here = jax.lax.cumsum(log_decay, axis=1, reverse=True)
  after = jnp.concatenate([from_here[:, 1:], jnp.zeros_like(from_here[:, :1])], axis=1)
  return from_here[:, 0], after


def delta_rule(
  q: jax.Array,  # [B, T, H, K]
  k: jax.Array,  # [B, T, H, K]
  v: jax.Array,  # [B, T, H, V]
  beta: jax.Array,  # [B, T, H] or [B, T, H, V]
  *,
  axis_name: str | None,
  log_decay: jax.Array | None = None,  # [B, T, H], values <= 0
  erase_key: jax.Array | None = None,  # [B, T, H, K]
  scale: float = 1.0,
  initial_state: DeltaRuleState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, DeltaRuleState]:
  """`ops.delta_rule` on a divided sequence. The exchange has B H K (K + V) numbers.

  A part's summary is the last state of a scan from zero, and that of a scan of zeros from the
  identity: the product of its transitions. With one rate per value column each column has a
  transition of its own, B H K (K + 1) V numbers in all, and K times as many columns are scanned.

  Raises:
    ValueError, NotImplementedError: as `ops.delta_rule`; ValueError: `axis_name` is not a mapped
      axis.
  """
  options = {
    "log_decay": log_decay,
    "erase_key": erase_key,
    "segment_ids": segment_ids,
    "implementation": implementation,
    "chunk_size": chunk_size,
  }
  run = functools.partial(ops.delta_rule, q, k, v, beta, scale=scale, **options)
  if axis_name is None:
    return run(initial_state=initial_state)
  added = run()[1]
  B, H, K, V = added.kv.shape
  columns = V if jnp.ndim(beta) == 4 else 1
  # Column (v, j) of the values starts as unit vector j, and has the rate of column v.
  units = jnp.tile(jnp.eye(K, dtype=added.kv.dtype), (B, H, 1, columns))
  nothing = jnp.zeros((*jnp.shape(v)[:3], columns * K), jnp.result_type(v))
  rates = jnp.repeat(beta, K, axis=-1) if columns > 1 else jnp.asarray(beta).reshape(v.shape[:3])
  _, (kept,) = ops.delta_rule(k, k, nothing, rates, initial_state=DeltaRuleState(units), **options)
  kept = kept.reshape(B, H, K, columns, K)

  def advance(summary, state):
    added, kept = summary
    carried = jnp.einsum(
      "bhkcj,bhjcw->bhkcw",
      kept,
      state.kv.reshape(B, H, K, columns, -1),
      precision="highest",
    )
    return DeltaRuleState(carried.reshape(B, H, K, V) + added.kv)

  initial = initial_or_zeros(initial_state, added)
  entering, final = states(axis_name, (added, kept), initial, advance, segment_ids)
  return run(initial_state=entering)[0], final


def elementwise_decay_scan(
  q: jax.Array,  # [B, T, H, K]
  k: jax.Array,  # [B, T, H, K]
  v: jax.Array,  # [B, T, H, V]
  log_decay: jax.Array | DecayFunction,  # [B, T, H, K, V] or [H, K, V], values <= 0
  *,
  axis_name: str | None,
  initial_state: ElementwiseDecayState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, ElementwiseDecayState]:
  """`ops.elementwise_decay_scan` on a divided sequence. The exchange has 2 B H K V numbers.

  A part's summary is the last state of a scan from zero, and that of a scan of zeros from one.

  Raises:
    ValueError, NotImplementedError: as `ops.elementwise_decay_scan`; ValueError: `axis_name` is
      not a mapped axis.
  """
  options = {
    "segment_ids": segment_ids,
    "implementation": implementation,
    "chunk_size": chunk_size,
  }
  if axis_name is None:
    return ops.elementwise_decay_scan(q, k, v, log_decay, initial_state=initial_state, **options)
  (_, k, v, _, state, _), _ = dispatch.checked(
    ops.elementwise_decay_scan, q, k, v, log_decay, initial_state=initial_state
  )
  both = lambda x, y: jnp.concatenate([x, y], axis=-1)
  if isinstance(log_decay, DecayFunction):
    make = log_decay.make

    def twice(steps, parameters):
      made = make(steps, parameters)
      return both(made, made)

    decays = DecayFunction(twice, log_decay.steps, log_decay.parameters)
  else:
    decays = both(log_decay, log_decay)
  _, (kv,) = ops.elementwise_decay_scan(
    k,
    k,
    both(v, jnp.zeros_like(v)),
    decays,
    initial_state=ElementwiseDecayState(both(jnp.zeros_like(state.kv), jnp.ones_like(state.kv))),
    **options,
  )
  entering, final = states(
    axis_name,
    jnp.split(kv, 2, axis=-1),
    initial_or_zeros(initial_state, state),
    lambda summary, state: ElementwiseDecayState(summary[1] * state.kv + summary[0]),
    segment_ids,
  )
  out, _ = ops.elementwise_decay_scan(q, k, v, log_decay, initial_state=entering, **options)
  return out, final

"""Linear attention on one shard of a sequence; ops/core/sequence_parallel.py has the exchange.

A shard's summary is one matrix product of all its keys, decayed to its end, with its values.
"""

import functools

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.grouped_heads import head_counts, over_groups
from lnssm_jax.ops.core.precision import decayed, product
from lnssm_jax.ops.core.sequence_parallel import states
from lnssm_jax.ops.core.spmd import vary_alike
from lnssm_jax.ops.linear_attention.types import Inputs, LinearAttentionState, Options


def sharded(run, inputs: Inputs, options: Options, axis_name: str):
  """(out of this shard, state after the whole sequence)."""
  initial = inputs.state
  if not options.normalize:
    initial = initial._replace(key_sum=None)
  inputs = vary_alike(inputs)
  summary = functools.partial(_summary, normalize=options.normalize)
  if inputs.state.kv.shape[1] == head_counts(inputs)[0]:
    added, total, value_total = over_groups(summary, inputs, (1, 1, 1))
  else:  # the queries alone have more heads
    added, total, value_total = summary(inputs)

  def advance(summary, state):
    added, total, value_total = summary
    kv = decayed(total[..., None], state.kv)
    kv = kv if value_total is None else decayed(value_total, kv)
    key_sum = None if added.key_sum is None else decayed(total, state.key_sum) + added.key_sum
    return LinearAttentionState(kv + added.kv, key_sum)

  entering, final = states(
    axis_name, (added, total, value_total), initial, advance, inputs.segments
  )
  if entering.key_sum is None:
    entering = entering._replace(key_sum=inputs.state.key_sum)
  out, _ = run(inputs._replace(state=entering), options._replace(fresh=False))
  return out, final


def _summary(inputs: Inputs, *, normalize: bool):
  """(The state after the shard from zero, the sum of its log decays, that of values' or None)."""
  _, k, v, log_decay, value_log_decay, _, state, segments, _ = inputs
  acc, T = state.kv.dtype, k.shape[1]
  total, after = _sums(log_decay.astype(acc), T)
  weighted = lambda x, after: x.astype(acc) * jnp.exp(after)
  keys = weighted(k, after)
  if segments is not None:
    keys = jnp.where(segments.in_last()[:, :, None, None], keys, 0)
  values, value_total = v, None
  if value_log_decay is not None:
    value_total, after = _sums(value_log_decay.astype(acc), T)
    values = weighted(v, after)
    value_total = value_total[..., None, :]
  added = product("bthk,bthv->bhkv", keys, values, v.dtype)
  key_sum = keys.sum(1) if normalize else None
  return LinearAttentionState(added, key_sum), total, value_total


def _sums(log_decay: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
  """Sums of all log decays, [B|1, H, X|1], and of those after each token, [B|1, T, H, X|1].

  No difference of sums is taken, so both are exact to the dtype.
  """
  if log_decay.shape[1] == 1:  # the same for every token; 0 times -inf is left out
    tokens = jnp.arange(length - 1, -1, -1, dtype=log_decay.dtype)[None, :, None, None]
    after = jnp.where(tokens > 0, tokens * log_decay, 0.0)
    return length * log_decay[:, 0], after
  from_here = jax.lax.cumsum(log_decay, axis=1, reverse=True)
  after = jnp.concatenate([from_here[:, 1:], jnp.zeros_like(from_here[:, :1])], axis=1)
  return from_here[:, 0], after

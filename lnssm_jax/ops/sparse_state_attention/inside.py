"""The recurrence inside a partition: linear attention with decay, or the gated delta rule."""

import jax

from lnssm_jax.ops.delta_rule.api import delta_rule
from lnssm_jax.ops.delta_rule.types import DeltaRuleState
from lnssm_jax.ops.linear_attention.api import linear_attention
from lnssm_jax.ops.linear_attention.types import LinearAttentionState
from lnssm_jax.ops.sparse_state_attention.types import Options


def recurrence(
  q: jax.Array,  # [B, T, H, K]
  k: jax.Array,  # [B, T, H, K]
  v: jax.Array,  # [B, T, H, V]
  log_decay: jax.Array | None,  # [B, T, H, K|1] or [H, K|1]
  beta: jax.Array | None,  # [B, T, H, 1]
  options: Options,
  *,
  initial: jax.Array | None = None,  # [B, H, K, V]
  segment_ids: jax.Array | None,
  chunk_size: int | None,
) -> tuple[jax.Array, jax.Array]:
  """(out [B, T, H, V], the state after the last token [B, H, K, V])."""
  if log_decay is not None and log_decay.shape[-1] == 1:
    log_decay = log_decay[..., 0]
  rest = {
    "scale": options.scale,
    "segment_ids": segment_ids,
    "implementation": options.implementation,
    "chunk_size": chunk_size,
  }
  if beta is None:
    state = None if initial is None else LinearAttentionState(initial)
    out, last = linear_attention(q, k, v, log_decay=log_decay, initial_state=state, **rest)
    return out, last.kv
  if log_decay is not None and log_decay.ndim == 1:
    log_decay = jax.numpy.broadcast_to(log_decay, q.shape[:3])
  state = None if initial is None else DeltaRuleState(initial)
  out, last = delta_rule(q, k, v, beta[..., 0], log_decay=log_decay, initial_state=state, **rest)
  return out, last.kv

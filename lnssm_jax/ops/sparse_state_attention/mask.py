"""All partitions as heads of one linear attention.

In a head that a token does not select, nothing is written or read, and nothing decays.
"""

import jax.numpy as jnp

from lnssm_jax.ops.core.precision import accumulation_dtype
from lnssm_jax.ops.linear_attention.api import linear_attention
from lnssm_jax.ops.linear_attention.types import LinearAttentionState
from lnssm_jax.ops.sparse_state_attention.types import Inputs, Options, SparseState


def mask(inputs: Inputs, options: Options):
  """All arguments of the linear attention are N times as large."""
  q, k, v, indices, write, read, log_decay, state, segments = inputs
  (B, T, S), (N, H, K, V) = indices.shape, state.kv.shape[1:]
  acc = accumulation_dtype(q, k, v)
  # A loop over S instead of a gather, whose transpose would be a scatter.
  hits = [indices[:, :, s, None] == jnp.arange(N) for s in range(S)]  # [B, T, N] each
  selected = jnp.any(jnp.stack(hits), axis=0)

  def choose(x):
    """[B, T, S, ...] -> [B, T, N, ...], zeros where nothing is selected."""
    axes = tuple(range(3, x.ndim))
    chosen = jnp.zeros((), x.dtype)
    for s, hit in enumerate(hits):
      chosen = jnp.where(jnp.expand_dims(hit, axes), x[:, :, s, None], chosen)
    return chosen

  def spread(x):
    """[B, T, S|1, H, X] -> [B, T, N, H, X] likewise."""
    if x.shape[2] > 1:
      return choose(x)
    return jnp.where(selected[..., None, None], x, 0)

  def gated(gate, x):
    product = choose(gate.astype(acc))[..., None, None] * spread(x.astype(acc))
    return product.reshape(B, T, N * H, K)

  if log_decay is not None:
    log_decay = spread(jnp.broadcast_to(log_decay, (B, T, *log_decay.shape[2:])))
    log_decay = log_decay.reshape(B, T, N * H, -1)
    log_decay = log_decay[..., 0] if log_decay.shape[-1] == 1 else log_decay
  out, final = linear_attention(
    gated(read, q[:, :, None]),
    gated(write, k),
    spread(v).reshape(B, T, N * H, V),
    log_decay=log_decay,
    scale=options.scale,
    initial_state=LinearAttentionState(state.kv.reshape(B, N * H, K, V)),
    segment_ids=None if segments is None else segments.index,
    implementation=options.implementation,
    chunk_size=options.chunk_size,
  )
  out = out.reshape(B, T, N, H, V).astype(acc).sum(2)
  return out, SparseState(final.kv.reshape(state.kv.shape))

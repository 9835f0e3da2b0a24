"""All partitions as heads of one linear attention or delta rule.

In a head that a token does not select, nothing is written or read, and nothing decays.
"""

import jax.numpy as jnp

from lnssm_jax.ops.core.precision import accumulation_dtype
from lnssm_jax.ops.sparse_state_attention.inside import recurrence
from lnssm_jax.ops.sparse_state_attention.types import Inputs, Options, SparseState


def mask(inputs: Inputs, options: Options):
  """All arguments of the recurrence inside are N times as large."""
  q, k, v, indices, write, read, log_decay, beta, state, segments = inputs
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

  def fold(x):
    return x.reshape(B, T, N * H, x.shape[-1])

  def gated(gate, x):
    product = choose(gate.astype(acc))[..., None, None] * spread(x.astype(acc))
    return fold(product).astype(x.dtype)

  if log_decay is not None:
    log_decay = fold(spread(jnp.broadcast_to(log_decay, (B, T, *log_decay.shape[2:]))))
  out, kv = recurrence(
    gated(read, q[:, :, None]),
    gated(write, k) if beta is None else fold(spread(k)),
    fold(spread(v)),
    log_decay,
    None if beta is None else gated(write, beta),
    options,
    initial=None if options.fresh else state.kv.reshape(B, N * H, K, V),
    segment_ids=None if segments is None else segments.index,
    chunk_size=options.chunk_size,
  )
  out = out.reshape(B, T, N, H, V).astype(acc).sum(2)
  return out, SparseState(kv.reshape(state.kv.shape))

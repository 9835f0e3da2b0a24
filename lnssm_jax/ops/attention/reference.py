"""Softmax attention with all scores in memory, as mathematics writes it. The oracle in float64.

Takes the arguments that `api.py` has checked: q [B, T, H, K]; k [B, T, G, K]; v [B, T, G, V]; the
cache or None; the steps.
"""

import jax.numpy as jnp

from lnssm_jax.ops.attention.state import Steps, cached_steps
from lnssm_jax.ops.checks import accumulation_dtype


def reference(q, k, v, state, steps, *, rule, scale, segmented, chunk_size=None):
  """out [B, T, H, V]."""
  del segmented, chunk_size
  acc = accumulation_dtype(q, k, v)
  B, T, H, K = q.shape
  keys = steps
  if state is not None:
    k, v = jnp.concatenate([state.k, k], 1), jnp.concatenate([state.v, v], 1)
    keys = Steps(*(jnp.concatenate(x, 1) for x in zip(cached_steps(state), steps, strict=True)))
  groups = k.shape[2]
  q = q.reshape(B, T, groups, H // groups, K).astype(acc)
  scores = scale * jnp.einsum("btgrk,bsgk->bgrts", q, k.astype(acc), precision="highest")
  scores = jnp.where(rule.visible(steps, keys)[:, None, None], scores, -jnp.inf)
  weights = jnp.exp(scores - scores.max(-1, keepdims=True))
  weights = weights / weights.sum(-1, keepdims=True)
  out = jnp.einsum("bgrts,bsgv->btgrv", weights, v.astype(acc), precision="highest")
  return out.reshape(B, T, H, -1).astype(v.dtype)

"""Softmax attention with all scores in memory, as the mathematics states it: the float64 oracle."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.attention.cache import cached_tokens, tokens_of
from lnssm_jax.ops.attention.types import Inputs, Options, Tokens
from lnssm_jax.ops.core.dropout import multipliers
from lnssm_jax.ops.core.precision import accumulation_dtype


def reference(inputs: Inputs, options: Options) -> jax.Array:
  """out [B, T, H, V]."""
  q, k, v, state, _, dropout_keys, sinks = inputs
  acc = accumulation_dtype(q, k, v)
  B, T, H, K = q.shape
  queries = keys = tokens_of(inputs)
  if state is not None:
    k, v = jnp.concatenate([state.k, k], 1), jnp.concatenate([state.v, v], 1)
    both = zip(cached_tokens(state), queries, strict=True)
    keys = Tokens(*(jnp.concatenate(x, 1) for x in both))
  groups = k.shape[2]
  q = q.reshape(B, T, groups, H // groups, K).astype(acc)
  scores = jnp.einsum("btgrk,bsgk->bgrts", q, k.astype(acc), precision="highest")
  scores = options.capped(scores)
  scores = jnp.where(options.mask.visible(queries, keys)[:, None, None], scores, -jnp.inf)
  if sinks is not None:  # a column of a key with the value 0
    shape = (*scores.shape[:-1], 1)
    of_head = sinks.astype(acc).reshape(groups, -1, 1, 1)
    scores = jnp.concatenate([scores, jnp.broadcast_to(of_head, shape)], axis=-1)
  weights = jnp.exp(scores - scores.max(-1, keepdims=True))
  weights = weights / weights.sum(-1, keepdims=True)
  weights = weights[..., : k.shape[1]]
  if dropout_keys is not None:
    factors = multipliers(
      dropout_keys[:, :, :, None], keys.position[:, None, None], options.dropout, acc
    )
    weights = weights * jnp.moveaxis(factors, 1, 2).reshape(weights.shape)
  out = jnp.einsum("bgrts,bsgv->btgrv", weights, v.astype(acc), precision="highest")
  return out.reshape(B, T, H, -1).astype(v.dtype)

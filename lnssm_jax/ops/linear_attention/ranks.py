"""R queries, keys and values per token, as R rows of a sequence.

A token's rows stand one after the other, padded to a power of two, which divides every chunk. Its
first row has its decay, the others none, so that no row of a token decays another. Then a form is
that of R = 1, but that a row reads all rows of its token, each times `own_weight`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.checks import check_shape
from lnssm_jax.ops.core.precision import accumulation_dtype
from lnssm_jax.ops.linear_attention.types import Inputs, Options


def rows_of(op: str, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Any, Any, Any, int]:
  """q, k [B, T, R, H, K] and v [B, T, R, H, V] as rows [B, T rank, H, X]; and the rank.

  Raises:
    ValueError: they have not the same R.
  """
  B, T, R, *_ = q.shape
  for name, x, last in (("k", k, "K"), ("v", v, "V")):
    check_shape(op, name, x, (B, T, R, None, None), f"[B, T, R] of q, then [H, {last}]")
  rank = 1 << max(R - 1, 0).bit_length()
  padded = (jnp.pad(x, ((0, 0), (0, 0), (0, rank - R), (0, 0), (0, 0))) for x in (q, k, v))
  q, k, v = (x.reshape(B, T * rank, *x.shape[3:]) for x in padded)
  return q, k, v, rank


def rows_to_tokens(out: jax.Array, tokens: tuple[int, ...]) -> jax.Array:
  """Rows [B, T rank, H, V] as [*tokens, H, V], tokens [B, T] or [B, T, R]."""
  if len(tokens) == 2:
    return out
  B, T, R = tokens
  return out.reshape(B, T, -1, *out.shape[2:])[:, :, :R]


def rows_of_tokens(inputs: Inputs, rank: int) -> Inputs:
  """Decays, own weights and documents of tokens as those of their rows; q, k, v have rows."""
  B, rows = inputs.q.shape[:2]
  decay = jnp.broadcast_to(inputs.log_decay, (B, rows // rank, *inputs.log_decay.shape[2:]))
  decay = jnp.pad(decay[:, :, None], ((0, 0), (0, 0), (0, rank - 1), (0, 0), (0, 0)))
  repeat = lambda x: jnp.repeat(x, rank, axis=1)
  own = inputs.own_weight
  return inputs._replace(
    log_decay=decay.reshape(B, rows, *decay.shape[3:]),
    own_weight=jnp.ones((B, rows, 1), decay.dtype) if own is None else repeat(own),
    segments=jax.tree.map(repeat, inputs.segments),
  )


def form_over_ranks(form: Callable[[Inputs, Options], Any]) -> Callable[[Inputs, Options], Any]:
  """A form for R = 1 for any: a state for each key of a token, all of which each query reads."""

  def run(inputs, options):
    rank = options.rank
    if rank == 1:
      return form(inputs, options)
    acc = accumulation_dtype(inputs.q, inputs.k, inputs.v)
    first = lambda x: x[:, ::rank]
    each = lambda x: jnp.stack([x[:, n::rank].astype(acc) for n in range(rank)])
    log_decay, own_weight = first(inputs.log_decay), first(inputs.own_weight)
    tokens = inputs._replace(
      log_decay=log_decay, own_weight=own_weight, segments=jax.tree.map(first, inputs.segments)
    )

    def of_key(k, v, kv):
      state = inputs.state._replace(kv=kv)
      read = lambda q: form(tokens._replace(q=q, k=k, v=v, state=state), options)
      return jax.vmap(read, out_axes=(0, None))(each(inputs.q))

    kv = inputs.state.kv
    states = jnp.concatenate([kv[None], jnp.zeros((rank - 1, *kv.shape), kv.dtype)])
    out, state = jax.vmap(of_key)(each(inputs.k), each(inputs.v), states)
    out = jnp.moveaxis(jnp.sum(out, axis=0), 0, 2).astype(inputs.v.dtype)
    return out.reshape(*inputs.q.shape[:2], *out.shape[3:]), jax.tree.map(lambda x: x.sum(0), state)

  return run

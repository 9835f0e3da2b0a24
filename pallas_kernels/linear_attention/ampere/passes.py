"""Forward and backward pass on the kernels for Ampere: their order, splits and the normalizer.

The key sums of the normalizer, its denominators and their gradients are small sums over whole
arrays, which XLA computes; the kernels get the results.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.core.boundaries import DocumentBoundaries
from pallas_kernels.core.chunk_grid import (
  sum_of_groups,
)
from pallas_kernels.core.decay_tables import (
  ScalarDecayTables,
  scalar_decay_tables,
)
from pallas_kernels.core.mma import Mma
from pallas_kernels.linear_attention.ampere.decays import SMALLEST_LOG_DECAY
from pallas_kernels.linear_attention.ampere.gradients import (
  GradientInputs,
  ValueInputs,
  query_key_gradients,
  value_gradients,
)
from pallas_kernels.linear_attention.ampere.scores import ScoreInputs, chunk_scores
from pallas_kernels.linear_attention.ampere.states import StateInputs, StateOutputs, states
from pallas_kernels.linear_attention.sequence import recur, tokens_in_chunks
from pallas_kernels.linear_attention.types import Inputs, Options, has_channel_decay


class Residuals(NamedTuple):
  """Results of the forward pass that the backward pass needs, besides the arguments."""

  states: jax.Array  # [B, H, N, K, V] bfloat16, that enter the chunks
  total: jax.Array  # [B|1, H, N|1, K], or without K: the decay over each chunk
  scores: jax.Array | None  # [B, H, T, C] bfloat16
  q: jax.Array | None  # channel decays: [B, T, H, K] bfloat16, decayed from the chunk's start
  k: jax.Array | None  # ... and to its end
  key_sums: jax.Array | None  # [B, H, N, K] float32, that enter the chunks
  out: jax.Array | None  # with the normalizer
  denominator: jax.Array | None  # [B, H, T] float32


def forward(
  options: Options, inputs: Inputs, segments: jax.Array | None, *, for_gradient: bool
) -> tuple[Any, Residuals | None]:
  """The results of `op.linear_attention`, and what the backward pass needs of this one."""
  q, k, v, log_decay, _, kv, key_sum, _ = inputs
  normalize, H, C, T = options.normalize, inputs.heads, options.config.chunk, q.shape[1]
  backend, documents = Mma(options.interpret), DocumentBoundaries.of(segments)
  channel = has_channel_decay(log_decay)
  tables: Any = None if channel else decay_tables(options, documents, T)(log_decay)
  made = _scores(options, inputs, documents, tables, backend)
  total = total_decay(options, log_decay, made.log2_total, documents, T) if channel else None
  total = tables.total if total is None else total
  q_state, k_state = (made.q, made.k) if channel else (q, k)
  before, after = (None, None) if channel else (tables.before, tables.after)
  key_sums = last_key_sum = denominator = None
  if normalize:
    added = _sum_over_chunks(k_state, _rows(after, T), H, C)
    key_sums, last_key_sum = _key_sums(total, added, key_sum, reverse=False)
    of_state = _per_chunk(q_state, H, C).astype(jnp.float32) * key_sums.swapaxes(1, 2)[:, :, None]
    of_state = of_state.sum(-1).reshape(*q.shape[:2], H).swapaxes(1, 2)
    rows = _rows(before, T)
    denominator = made.score_sum + (of_state if rows is None else of_state * rows)
  results = _along_chunks(
    StateInputs(
      k_state,
      v,
      after,
      total,
      kv,
      q=q_state,
      scores=made.scores,
      before=before,
      denominator=denominator,
    ),
    options,
    H,
    store_states=for_gradient,
    scale=options.scale,
  )
  result = results.out, results.last[:, :, -1], last_key_sum
  if not for_gradient:
    return result, None
  if normalize:  # whose outputs are kept: the scores are cheap to compute again
    kept = None, None, None, key_sums, results.out, denominator
  else:
    kept = made.scores, made.q, made.k, None, None, None
  return result, Residuals(results.states, total, *kept)


def _scores(options, inputs: Inputs, documents, tables, backend) -> Any:
  """Scores within chunks, and queries and keys with their decays; `tables` of a scalar decay."""
  return chunk_scores(
    ScoreInputs(
      inputs.q,
      inputs.k,
      inputs.log_decay if tables is None else None,
      None if tables is None else tables.cumulative,
      inputs.bonus,
      documents if tables is None else documents.mask_only,
      None if inputs.own_weight is None else inputs.own_weight.swapaxes(1, 2),
    ),
    heads=inputs.heads,
    length=options.length,
    sums=options.normalize,
    rank=options.rank,
    backend=backend,
  )


def backward(
  options: Options,
  inputs: Inputs,
  segments: jax.Array | None,
  kept: Any,  # `Residuals`
  cotangents: Sequence[jax.Array | None],  # of the results of `op.linear_attention`; None: zeros
  decays: bool,  # whether the decay wants a gradient
) -> Inputs:
  """Gradients of the inputs."""
  q, k, v, log_decay, bonus, kv, key_sum, own_weight = inputs
  H, C, T = inputs.heads, options.config.chunk, q.shape[1]
  backend, documents = Mma(options.interpret), DocumentBoundaries.of(segments)
  d_out, d_last, d_last_key_sum = cotangents
  if d_out is None:
    d_out = jnp.zeros((*v.shape[:2], H, v.shape[3]), v.dtype)
  scale, d_denominator = options.scale, None
  if options.normalize:
    d_out, d_denominator = _division_gradient(d_out, kept, options)
    scale = 1.0
  d_last = None if d_last is None else d_last / scale
  channel = has_channel_decay(log_decay)
  tables: Any = None
  tables_vjp: Any = None
  if not channel:
    tables, tables_vjp = jax.vjp(decay_tables(options, documents, T), log_decay)
  at_chunk = kept
  if options.normalize:
    at_chunk = _scores(options, inputs, documents, tables, backend)
  q_state, k_state = (at_chunk.q, at_chunk.k) if channel else (q, k)
  before, after = (None, None) if channel else (tables.before, tables.after)
  adjoints = _along_chunks(
    StateInputs(q_state, d_out, before, kept.total, d_last),
    options,
    H,
    store_states=True,
    reverse=True,
  )
  d_key_sums = d_key_sum = None
  if options.normalize:
    rows = _rows(before, T)
    rows = d_denominator if rows is None else d_denominator * rows
    added = _sum_over_chunks(q_state, rows, H, C)
    d_key_sums, d_key_sum = _key_sums(kept.total, added, d_last_key_sum, reverse=True)
  made = query_key_gradients(
    GradientInputs(
      q,
      k,
      v,
      d_out,
      kept.states,
      adjoints.states,
      documents if channel else documents.mask_only,
      d_denominator,
      kept.key_sums,
      d_key_sums,
      **(
        {"log_decay": log_decay, "bonus": bonus}
        if channel
        else {"cumulative": tables.cumulative, "before": before, "after": after}
      ),
      own_weight=None if own_weight is None else own_weight.swapaxes(1, 2),
      total=_expanded(kept.total, adjoints.states) if channel and log_decay.ndim == 4 else None,
    ),
    heads=H,
    length=options.length,
    scale=scale,
    decays=decays,
    rank=options.rank,
    backend=backend,
  )
  d_v = value_gradients(
    ValueInputs(k_state, d_out, at_chunk.scores, adjoints.states, after),
    heads=H,
    scale=scale,
    backend=backend,
  )
  if not decays:
    d_log_decay = jnp.zeros_like(log_decay)
  elif not channel:
    d_log_decay = gradient_of_tables(made, tables, tables_vjp)
  elif log_decay.ndim == 4:
    d_log_decay = sum_of_groups(made.log_decay, log_decay)
  else:
    tokens = tokens_in_chunks(options, T)[:, None]
    d_log_decay = (made.log_decay + tokens * kept.total * made.d_total).sum((0, 2))
  return Inputs(
    sum_of_groups(made.q, q),
    sum_of_groups(made.k, k),
    sum_of_groups(d_v, v),
    scale * d_log_decay,
    None if bonus is None else scale * made.bonus.sum((0, 2)),
    None if kv is None else scale * adjoints.last[:, :, 0],
    None if key_sum is None or d_key_sum is None else scale * d_key_sum,
    None if own_weight is None else scale * made.own_weight.sum(2).swapaxes(1, 2),
  )


def decay_tables(options: Any, documents: DocumentBoundaries, padded: int):
  """A function of scalar log decays: their `ScalarDecayTables`.

  `options`: this op's or, as in `total_decay`, the delta rule's.
  """
  sizes = {"length": options.length, "padded": padded, "chunk": options.config.chunk}
  return lambda log_decay: scalar_decay_tables(log_decay, documents, **sizes)


def gradient_of_tables(made, tables: ScalarDecayTables, tables_vjp) -> jax.Array:
  """The gradient of scalar log decays from those of their tables."""

  def sum_to(x, like):
    x = x.reshape(*x.shape[:2], -1, like.shape[2]).sum(2)
    return x.sum(0, keepdims=True) if like.shape[0] == 1 else x

  d_tables = ScalarDecayTables(
    cumulative=(made.later - made.earlier).sum(2),
    before=made.before.sum(2),
    after=made.after.sum(2),
    total=made.d_total.sum(-1),
  )
  (d_log_decay,) = tables_vjp(ScalarDecayTables(*map(sum_to, d_tables, tables)))
  return d_log_decay


def total_decay(options: Any, log_decay, log2_total, documents, padded: int) -> jax.Array:
  """[B|1, H, N, K]: the decay over each chunk, 0 where no state passes it."""
  if log2_total is not None:
    return documents.reset(jnp.exp2(log2_total), options.config.chunk)
  rate = jnp.maximum(log_decay, SMALLEST_LOG_DECAY)[:, None]
  decay = jnp.exp(tokens_in_chunks(options, padded)[:, None] * rate)
  return documents.reset(decay[None], options.config.chunk)


def _along_chunks(
  inputs: StateInputs, options: Options, heads: int, *, reverse: bool = False, **how
) -> StateOutputs:
  """`states` with `inputs.initial` [B, H, K, V] or None for the whole sequence, in its splits."""
  P, initial = options.num_splits, inputs.initial
  how |= {"heads": heads, "num_splits": P, "reverse": reverse, "backend": Mma(options.interpret)}
  if P == 1:
    entering = None if initial is None else initial[:, :, None]
    return states(inputs._replace(initial=entering), **how)
  alone = StateInputs(inputs.a, inputs.b, inputs.weight, inputs.decay, None)
  added = states(alone, **how | {"store_states": False}).last
  chunks = inputs.a.shape[1] // options.config.chunk
  total = inputs.decay if inputs.decay.ndim == 4 else inputs.decay[..., None]
  total = jnp.broadcast_to(total, (*total.shape[:2], chunks, total.shape[3]))
  total = total.reshape(*total.shape[:2], P, -1, total.shape[3]).prod(3)[..., None]
  first = jnp.zeros_like(added[:, :, 0]) if initial is None else initial
  entering = recur(total, added, first, reverse=reverse)
  return states(inputs._replace(initial=entering), **how)


# The normalizer


def _rows(table: jax.Array | None, padded: int) -> jax.Array | None:
  """[B|1, H, T] of a table, in which chunks that are all alike are stored once."""
  if table is None:
    return None
  return jnp.tile(table, (1, 1, padded // table.shape[2]))


def _per_chunk(x: jax.Array, heads: int, chunk: int) -> jax.Array:
  """[B, N, C, H, X] of x [B, T, H or fewer, X]."""
  x = jnp.repeat(x, heads // x.shape[2], axis=2)
  return x.reshape(x.shape[0], -1, chunk, *x.shape[2:])


def _sum_over_chunks(x: jax.Array, rows: jax.Array | None, heads: int, chunk: int) -> jax.Array:
  """[B, H, N, X] float32: the sum over the tokens of each chunk of x, times `rows` [B|1, H, T]."""
  x = _per_chunk(x, heads, chunk).astype(jnp.float32)
  if rows is not None:
    x = x * rows.swapaxes(1, 2).reshape(rows.shape[0], *x.shape[1:4], 1)
  return x.sum(2).swapaxes(1, 2)


def _expanded(total: jax.Array, like: jax.Array) -> jax.Array:
  """[B, H, N, K] of the decay over each chunk; like: [B, H, N, K, V]."""
  total = total if total.ndim == 4 else total[..., None]
  return jnp.broadcast_to(total, like.shape[:4])


def _key_sums(total, added, first, *, reverse: bool) -> tuple[jax.Array, jax.Array]:
  """The sums [B, H, N, K] that enter the chunks, and the last one [B, H, K]."""
  total = jnp.broadcast_to(total if total.ndim == 4 else total[..., None], added.shape)
  first = jnp.zeros_like(added[:, :, 0]) if first is None else first
  entering = recur(total, added, first, reverse=reverse)
  end = 0 if reverse else -1
  return entering, total[:, :, end] * entering[:, :, end] + added[:, :, end]


def _division_gradient(d_out, kept: Any, options: Options) -> tuple[jax.Array, jax.Array]:
  """The cotangents of n [B, T, H, V] bfloat16 and D [B, H, T], of out = scale n / D.

  They are 0 in padding.
  """
  T = d_out.shape[1]
  is_token = (jnp.arange(T) < options.length)[None, None]
  inverse = jnp.where(is_token, 1.0 / kept.denominator, 0.0)
  d_out = jnp.where(is_token[..., None].swapaxes(1, 2), d_out.astype(jnp.float32), 0.0)
  out = jnp.where(is_token[..., None].swapaxes(1, 2), kept.out.astype(jnp.float32), 0.0)
  d_denominator = -jnp.sum(d_out * out, axis=-1).swapaxes(1, 2) * inverse
  d_n = d_out * (options.scale * inverse.swapaxes(1, 2)[..., None])
  return d_n.astype(kept.out.dtype), d_denominator

"""Linear attention in chunks: matrix products inside, a short scan over the states between.

The derivation, forward and backward, is in README.md. The backward pass keeps the inputs and the
states between chunks, and recomputes the rest (custom VJP). How pairs of tokens are weighted by the
decays between them is in `../core/decay_sums.py`.

Arrays are `[N, B, H, C, X]`, N chunks of C tokens; decays may have size 1 on any axis but H and C.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core import chunk_groups
from lnssm_jax.ops.core.chunking import chunk, chunk_of, join
from lnssm_jax.ops.core.decay_sums import (
  Sums,
  blocks,
  cross_scores,
  decayed_scores,
  diagonal_scores,
  halves,
  whole_chunk,
)
from lnssm_jax.ops.core.grouped_heads import over_readers
from lnssm_jax.ops.core.precision import accumulation_dtype, decayed, product
from lnssm_jax.ops.core.segments import ChunkSegments, no_gradient
from lnssm_jax.ops.linear_attention.types import Inputs, LinearAttentionState, Options
from pallas_kernels.core.gradients import custom_vjp

DEFAULT_CHUNK_SIZE = 64


class _Static(NamedTuple):
  """Trace-time constants."""

  normalize: bool
  scale: float
  chunk_size: int
  rank: int


class Chunks(NamedTuple):
  """The inputs, split into chunks."""

  q: jax.Array  # [N, B, H, C, K]
  k: jax.Array  # [N, B, H, C, K]
  v: jax.Array  # [N, B, H, C, V]
  log_decay: jax.Array  # [N|1, B|1, H|1, C, K|1]
  value_log_decay: jax.Array | None  # [N|1, B|1, H, C, V]
  bonus: jax.Array | None  # [H, 1, K]
  own_weight: jax.Array | None  # [N, B, H, C]


class Summary(NamedTuple):
  """Effect of a chunk on the state: S -> diag(decay) S diag(value decay) + added."""

  log_decay: jax.Array  # [N|1, B|1, H|1, K|1]
  value_log_decay: jax.Array | None  # [N|1, B|1, H, V]
  added: LinearAttentionState  # [N, B, H, K, V] and [N, B, H, K]


def chunked(inputs: Inputs, options: Options) -> tuple[jax.Array, LinearAttentionState]:
  """The chunked form."""
  chunk_size = chunk_of(options.chunk_size or DEFAULT_CHUNK_SIZE, inputs.q.shape[1])
  chunk_size = max(chunk_size, options.rank)  # whole tokens
  if not options.normalize:
    inputs = inputs._replace(state=inputs.state._replace(key_sum=None))
  form = functools.partial(
    _scan, _Static(options.normalize, options.scale, chunk_size, options.rank)
  )
  return chunk_groups.run_inputs(form, inputs, chunk_size)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _scan(static, inputs):
  return _forward(static, inputs)[0]


def _forward(static, inputs):
  """Returns (out, final state) and the residuals."""
  chunks = _split(inputs, static.chunk_size)
  segments = _segments(inputs, static)
  summary = summarize(chunks, segments, static.normalize)
  final, entering = _carry_states(summary, inputs.state)
  out, denominator = outputs(chunks, segments, entering, static.normalize, static.rank)
  length = inputs.q.shape[1]
  out = static.scale * join(out, length)
  if static.normalize:
    denominator = join(denominator[..., None], length)
    out = out / denominator
  out = out.astype(inputs.v.dtype)
  return (out, final), (inputs, entering, out, denominator)


@jax.named_scope("linear_attention")
def _backward(static, residuals, cotangents):
  inputs, entering, out, denominator = residuals
  d_out, d_final = cotangents
  acc = accumulation_dtype(inputs.q, inputs.k, inputs.v)
  d_out, d_denominator = d_out.astype(acc), None
  if static.normalize:
    # y = scale n / D: dn = scale dy / D, dD = -(dy . y) / D. Before padding: no padded row may
    # divide by its zero.
    d_denominator = -jnp.sum(d_out * out.astype(acc), axis=-1, keepdims=True) / denominator
    d_denominator = chunk(d_denominator, static.chunk_size)[..., 0]
    d_out = d_out / denominator
  d_out = static.scale * chunk(d_out, static.chunk_size)

  segments, inputs = _segments(inputs, static), inputs._replace(segments=None)
  chunks, split_vjp = jax.vjp(lambda inputs: _split(inputs, static.chunk_size), inputs)
  _, outputs_vjp = jax.vjp(
    lambda *args: outputs(args[0], segments, args[1], static.normalize, static.rank),
    chunks,
    entering,
  )
  d_chunks, d_entering = outputs_vjp((d_out, d_denominator))
  summary, summarize_vjp = jax.vjp(
    lambda chunks: summarize(chunks, segments, static.normalize), chunks
  )
  d_initial, leaving = _carry_adjoints(summary, d_entering, d_final)
  _, advance_vjp = jax.vjp(lambda summary: advance(summary, entering), summary)
  (d_chunks_by_state,) = summarize_vjp(*advance_vjp(leaving))
  (d_inputs,) = split_vjp(jax.tree.map(jnp.add, d_chunks, d_chunks_by_state))
  return (d_inputs._replace(state=d_initial, segments=no_gradient(residuals[0].segments)),)


_scan.defvjp(_forward, _backward)


def _segments(inputs, static):
  return None if inputs.segments is None else inputs.segments.chunks(static.chunk_size)


def _carry_states(summary: Summary, initial: LinearAttentionState):
  """The state after the last chunk, and the one that enters each."""

  def step(state, summary_n):
    return advance(summary_n, state), state

  return _scan_chunks(step, initial, summary)


def _carry_adjoints(summary: Summary, d_entering: LinearAttentionState, d_final):
  """The cotangent of the initial state, and of the state that leaves each chunk."""

  def step(adjoint, inputs):
    summary_n, d_entering_n = inputs
    zeros = jax.tree.map(jnp.zeros_like, adjoint)
    decayed = advance(summary_n._replace(added=zeros), adjoint)  # diagonal: its own transpose
    return jax.tree.map(jnp.add, decayed, d_entering_n), adjoint

  return _scan_chunks(step, d_final, (summary, d_entering), reverse=True)


def _scan_chunks(step, carry, xs, *, reverse=False):
  """`lax.scan` over the leading axis; arrays of size 1 there are the same for every chunk."""
  leaves, treedef = jax.tree.flatten(xs)
  length = max(x.shape[0] for x in leaves)
  constant = [x[0] if x.shape[0] == 1 else None for x in leaves]
  varying = [x for x in leaves if x.shape[0] != 1]
  if length == 1:
    carry, y = step(carry, jax.tree.unflatten(treedef, constant))
    return carry, jax.tree.map(lambda x: x[None], y)

  def body(carry, varying_n):
    rest = iter(varying_n)
    return step(
      carry, jax.tree.unflatten(treedef, [next(rest) if c is None else c for c in constant])
    )

  return jax.lax.scan(body, carry, varying, reverse=reverse)


def _split(inputs: Inputs, size: int) -> Chunks:
  length = inputs.q.shape[1]
  bonus, values, own = inputs.bonus, inputs.value_log_decay, inputs.own_weight
  return Chunks(
    chunk(inputs.q, size),
    chunk(inputs.k, size),
    chunk(inputs.v, size),
    _chunk_decay(inputs.log_decay, length, size),
    None if values is None else _chunk_decay(values, length, size),
    None if bonus is None else bonus.astype(inputs.log_decay.dtype)[:, None, :],
    None if own is None else chunk(own[..., None], size)[..., 0],
  )


def _chunk_decay(decay, length, size):
  """Like `chunk`, keeping axes of size 1; a constant decay spans the tokens of one chunk only."""
  B, T, H, X = decay.shape
  if T == 1 and length % size == 0:
    return jnp.broadcast_to(decay.transpose(1, 0, 2, 3)[:, :, :, None], (1, B, H, size, X))
  # Padding must not decay the final state, so the last chunk differs from the others.
  return chunk(jnp.broadcast_to(decay, (B, length, H, X)), size)


def advance(summary: Summary, state: LinearAttentionState) -> LinearAttentionState:
  """The state after a chunk, from the state before it."""
  kv = decayed(summary.log_decay[..., :, None], state.kv)
  if summary.value_log_decay is not None:
    kv = decayed(summary.value_log_decay[..., None, :], kv)
  key_sum = state.key_sum
  if key_sum is not None:
    key_sum = decayed(summary.log_decay, key_sum) + summary.added.key_sum
  return LinearAttentionState(kv + summary.added.kv, key_sum)


def summarize(chunks: Chunks, segments: ChunkSegments | None, normalize: bool) -> Summary:
  """The effect of each chunk on the state. `added.key_sum` is None unless `normalize`."""
  sums = whole_chunk(chunks.log_decay)
  keys = chunks.k * jnp.exp(sums.after)
  values = chunks.v
  log_decay, value_log_decay = sums.total[..., 0, :], None
  if segments is not None:
    keys, log_decay = segments.write(keys, log_decay)
  if chunks.value_log_decay is not None:
    value_sums = whole_chunk(chunks.value_log_decay)
    values = values * jnp.exp(value_sums.after)
    value_log_decay = value_sums.total[..., 0, :]
  added = product("...ck,...cv->...kv", keys, values, chunks.v.dtype)
  return Summary(
    log_decay, value_log_decay, LinearAttentionState(added, keys.sum(-2) if normalize else None)
  )


def outputs(
  chunks: Chunks,
  segments: ChunkSegments | None,
  entering: LinearAttentionState,
  normalize: bool,
  rank: int = 1,
):
  """Returns S_t^T q_t [N, B, H, C, V] and, if `normalize`, q_t^T z_t [N, B, H, C], else None.

  Heads of queries may share all else.
  """

  def read(q, bonus, own_weight):
    own = {"bonus": bonus, "own_weight": own_weight}
    return _outputs(chunks._replace(q=q, **own), segments, entering, normalize, rank)

  mapped = (chunks.q, 2), (chunks.bonus, 0), (chunks.own_weight, 2)
  return over_readers(read, chunks.k.shape[2], *mapped)


def _outputs(chunks: Chunks, segments, entering, normalize, rank):
  before = whole_chunk(chunks.log_decay, read_first=chunks.bonus is not None).before
  queries = chunks.q * jnp.exp(before)
  if segments is not None:
    queries = segments.read(queries)
  dtype = chunks.v.dtype
  from_state = product("...ck,...kv->...cv", queries, entering.kv, dtype)
  if chunks.value_log_decay is not None:
    from_state = from_state * jnp.exp(
      whole_chunk(chunks.value_log_decay, read_first=chunks.bonus is not None).before
    )
    return from_state + _outputs_with_value_decay(chunks, segments), None
  q, k, _, log_decay, _, bonus, own_weight = chunks
  own = None
  if bonus is not None or (own_weight is not None and rank == 1):
    own = _own_scores(chunks)
  scores = decayed_scores(
    q,
    k,
    log_decay,
    dtype,
    read_first=bonus is not None,
    diagonal=own,
    rank=rank,
    own_weight=own_weight,
  )
  if segments is not None:
    scores = segments.scores(scores)
  out = from_state + product("...ij,...jv->...iv", scores, chunks.v, dtype)
  if not normalize:
    return out, None
  from_sum = jnp.sum(queries * entering.key_sum[..., None, :], axis=-1)
  return out, from_sum + scores.sum(-1)


def _own_scores(chunks: Chunks) -> jax.Array:
  """[N, B, H, C]: the score of each token with itself, weighted."""
  scores = diagonal_scores(chunks.q, chunks.k, chunks.bonus)
  return scores if chunks.own_weight is None else chunks.own_weight * scores


def _outputs_with_value_decay(chunks: Chunks, segments: ChunkSegments | None) -> jax.Array:
  """[N, B, H, C, V]: outputs of a chunk without the entering state, when values decay too."""
  q, k, v, log_decay, value_log_decay, bonus, _ = chunks
  size, length = 1, q.shape[-2]
  sums = Sums.of_tokens(log_decay, bonus is not None)
  value_sums = Sums.of_tokens(value_log_decay, bonus is not None)
  out = (_own_scores(chunks)[..., None] * v)[..., None, :]  # [..., C/s, s, V]
  while size < length:
    cross = cross_scores(
      blocks(q, size), blocks(k, size), halves(sums.before)[1], halves(sums.after)[0], v.dtype
    )
    if segments is not None:
      token_1, token_2 = halves(blocks(segments.token[..., None], size))
      cross = jnp.where(token_2 == jnp.swapaxes(token_1, -1, -2), cross, 0.0)
    values = halves(blocks(v, size))[0] * jnp.exp(halves(value_sums.after)[0])
    carried = product("...ij,...jv->...iv", cross, values, v.dtype)
    first, second = halves(out)
    out = jnp.concatenate([first, second + jnp.exp(halves(value_sums.before)[1]) * carried], -2)
    sums, value_sums, size = sums.merged(), value_sums.merged(), 2 * size
  return out[..., 0, :, :]

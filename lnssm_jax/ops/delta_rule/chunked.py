"""The delta rule in chunks: one triangular system per chunk, a short scan over the states between.

The derivation, forward and backward, is in README.md. The backward pass keeps the inputs and the
states that enter the chunks, and recomputes the rest (custom VJP).

With `beta` shared by the value columns, the solution is affine in the entering state with one
matrix for all columns, so that the systems of all chunks are solved at once and the scan over
chunks is left with two matrix products. With one `beta` per column that matrix would differ from
column to column; then the scan solves each chunk's systems, in small chunks.

Arrays are `[N, B, H, C, X]`: N chunks of C tokens. The scans over chunks call the same functions
without the leading axis.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.chunking import chunk, chunk_of, join
from lnssm_jax.ops.core.grouped_heads import over_readers
from lnssm_jax.ops.core.precision import accumulation_dtype, decayed, product
from lnssm_jax.ops.core.segments import ChunkSegments, no_gradient
from lnssm_jax.ops.delta_rule.solve import solve, transposed_solve
from lnssm_jax.ops.delta_rule.types import DeltaRuleState, Inputs, Options
from pallas_kernels.core.gradients import custom_vjp

DEFAULT_CHUNK_SIZE = 64
DEFAULT_CHUNK_SIZE_PER_COLUMN = 16


class Chunks(NamedTuple):
  """The inputs, split into chunks."""

  q: jax.Array  # [N, B, H, C, K]
  k: jax.Array  # [N, B, H, C, K]
  erase_key: jax.Array  # [N, B, H, C, K]
  v: jax.Array  # [N, B, H, C, V]
  beta: jax.Array  # [N, B, H, C, 1 or V], float32
  log_decay: jax.Array  # [N, B, H, C], float32


class Updates(NamedTuple):
  """Effect of a chunk on a state S, given the corrections x = solve(gram, beta, v - read S):

  S -> exp(log_decay) S + write^T x.
  """

  gram: jax.Array  # [N, B, H, C, C], strictly lower: how a correction reaches a later old value
  beta: jax.Array  # [N, B, H, C, 1 or V]
  v: jax.Array  # [N, B, H, C, V]
  read: jax.Array  # [N, B, H, C, K]
  write: jax.Array  # [N, B, H, C, K]
  log_decay: jax.Array  # [N, B, H, 1, 1]


class Reads(NamedTuple):
  """The outputs, given S and x: queries S + scores x."""

  queries: jax.Array  # [N, B, H, C, K]
  scores: jax.Array  # [N, B, H, C, C]


def chunked(inputs: Inputs, options: Options) -> tuple[jax.Array, DeltaRuleState]:
  """The chunked form."""
  shared = inputs.beta.shape[-1] == 1
  default = DEFAULT_CHUNK_SIZE if shared else DEFAULT_CHUNK_SIZE_PER_COLUMN
  chunk_size = chunk_of(options.chunk_size or default, inputs.q.shape[1])
  return _scan(options.scale, chunk_size, inputs)


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def _scan(scale, chunk_size, inputs):
  return _forward(scale, chunk_size, inputs)[0]


def _forward(scale, chunk_size, inputs):
  """Returns (out, final state) and the residuals."""
  chunks = _split(inputs, chunk_size)
  segments = _segments(inputs, chunk_size)
  dtype = inputs.v.dtype
  final, entering, corrections = _carry_states(updates(chunks, segments), inputs.state.kv, dtype)
  out = read_out(chunks, segments, entering, corrections, dtype)
  out = (scale * join(out, inputs.q.shape[1])).astype(dtype)
  return (out, DeltaRuleState(final)), (inputs, entering)


@jax.named_scope("delta_rule")
def _backward(scale, chunk_size, residuals, cotangents):
  inputs, entering = residuals
  d_out, (d_final,) = cotangents
  dtype = inputs.v.dtype
  segments, inputs = _segments(inputs, chunk_size), inputs._replace(segments=None)
  chunks, split_vjp = jax.vjp(lambda inputs: _split(inputs, chunk_size), inputs)
  update, updates_vjp = jax.vjp(lambda chunks: updates(chunks, segments), chunks)
  corrections, corrections_vjp = jax.vjp(lambda u: _corrections(u, entering, dtype), update)

  _, outputs_vjp = jax.vjp(
    lambda chunks, state, x: read_out(chunks, segments, state, x, dtype),
    chunks,
    entering,
    corrections,
  )
  d_out = scale * chunk(d_out.astype(accumulation_dtype(inputs.q, inputs.k, inputs.v)), chunk_size)
  d_chunks, d_entering, d_corrections = outputs_vjp(d_out)
  d_initial, leaving, d_corrections = _carry_adjoints(
    update, d_entering, d_corrections, d_final, dtype
  )
  _, advance_vjp = jax.vjp(lambda u: advance(u, entering, corrections, dtype), update)
  d_update = jax.tree.map(jnp.add, advance_vjp(leaving)[0], corrections_vjp(d_corrections)[0])
  (d_inputs,) = split_vjp(jax.tree.map(jnp.add, d_chunks, updates_vjp(d_update)[0]))
  segments = no_gradient(residuals[0].segments)
  return (d_inputs._replace(state=DeltaRuleState(d_initial), segments=segments),)


_scan.defvjp(_forward, _backward)


def _corrections(update: Updates, state, dtype):
  """beta_t (v_t - the value that the erase key reads before token t), for every token."""
  old = product("...ck,...kv->...cv", update.read, state, dtype)
  return solve(update.gram, update.beta, update.v - old)


def _carry_states(update: Updates, initial, dtype):
  """The last state, those that enter the chunks, and the corrections."""
  if update.beta.shape[-1] == 1:
    V = update.v.shape[-1]
    both = solve(update.gram, update.beta, jnp.concatenate([update.v, update.read], -1))
    written, erased = both[..., :V], both[..., V:]
  else:
    written = erased = None

  def step(state, inputs):
    update, written, erased = inputs
    if written is None:
      x = _corrections(update, state, dtype)
    else:
      x = written - product("...ck,...kv->...cv", erased, state, dtype)
    return advance(update, state, x, dtype), (state, x)

  final, (entering, corrections) = jax.lax.scan(step, initial, (update, written, erased))
  return final, entering, corrections


def _carry_adjoints(update: Updates, d_entering, d_corrections, d_final, dtype):
  """Runs the cotangents of the states back through the transposed chunks.

  `d_entering` and `d_corrections` are the contributions of a chunk's outputs alone. Returns the
  cotangents of the initial state, of the states that leave, and of the corrections.
  """
  shared = update.beta.shape[-1] == 1
  erased = solve(update.gram, update.beta, update.read) if shared else None

  def step(adjoint, inputs):
    update, erased, d_entering, d_corrections = inputs
    d_corrections = d_corrections + product("...ck,...kv->...cv", update.write, adjoint, dtype)
    if erased is None:
      d_old, keys = transposed_solve(update.gram, update.beta, d_corrections), update.read
    else:
      d_old, keys = d_corrections, erased
    through = product("...ck,...cv->...kv", keys, d_old, dtype)
    decayed_adjoint = decayed(update.log_decay, adjoint)
    return decayed_adjoint + d_entering - through, (adjoint, d_corrections)

  d_initial, (leaving, d_corrections) = jax.lax.scan(
    step, d_final, (update, erased, d_entering, d_corrections), reverse=True
  )
  return d_initial, leaving, d_corrections


def _split(inputs: Inputs, size: int) -> Chunks:
  """Padding is zeros: beta = 0 leaves the state."""
  return Chunks(
    q=chunk(inputs.q, size),
    k=chunk(inputs.k, size),
    erase_key=chunk(inputs.erase, size),
    v=chunk(inputs.v, size),
    beta=chunk(inputs.beta, size),
    log_decay=chunk(inputs.log_decay[..., None], size)[..., 0],
  )


def _segments(inputs: Inputs, size: int) -> ChunkSegments | None:
  return None if inputs.segments is None else inputs.segments.chunks(size)


def updates(chunks: Chunks, segments: ChunkSegments | None) -> Updates:
  """Everything about the change of the state that does not depend on the state."""
  sums = _log_weights(chunks.log_decay, segments)
  gram = product("...ik,...jk->...ij", chunks.erase_key, chunks.k, chunks.v.dtype)
  strictly_lower = jnp.tri(gram.shape[-1], k=-1, dtype=bool)
  gram = jnp.where(strictly_lower, gram * jnp.exp(sums.between), 0.0)
  acc = chunks.beta.dtype
  read = chunks.erase_key.astype(acc) * jnp.exp(sums.before)[..., None]
  write = chunks.k.astype(acc) * jnp.exp(sums.after)[..., None]
  log_decay = sums.total[..., None, None]
  return Updates(gram, chunks.beta, chunks.v.astype(acc), read, write, log_decay)


def reads(chunks: Chunks, segments: ChunkSegments | None) -> Reads:
  """Everything about the outputs that does not depend on the state."""
  sums = _log_weights(chunks.log_decay, segments)
  scores = product("...ik,...jk->...ij", chunks.q, chunks.k, chunks.v.dtype)
  queries = chunks.q.astype(chunks.beta.dtype) * jnp.exp(sums.before)[..., None]
  return Reads(queries, scores * jnp.exp(sums.between))


def advance(update: Updates, state, corrections, dtype):
  """The state after a chunk."""
  written = product("...ck,...cv->...kv", update.write, corrections, dtype)
  return decayed(update.log_decay, state) + written


def read_out(chunks: Chunks, segments: ChunkSegments | None, state, corrections, dtype):
  """The outputs of all chunks; heads of queries may share all else."""

  def read(q):
    return outputs(reads(chunks._replace(q=q), segments), state, corrections, dtype)

  return over_readers(read, chunks.k.shape[2], (chunks.q, 2))


def outputs(read: Reads, state, corrections, dtype):
  """S_t^T q_t [N, B, H, C, V]."""
  from_state = product("...ck,...kv->...cv", read.queries, state, dtype)
  return from_state + product("...ij,...jv->...iv", read.scores, corrections, dtype)


class _LogWeights(NamedTuple):
  """Sums of log decays, -inf where nothing passes. Each adds terms of one sign."""

  between: jax.Array  # [N, B, H, C, C]: of the tokens after j up to i; -inf for j > i
  before: jax.Array  # [N, B, H, C]: from the chunk's start up to i
  after: jax.Array  # [N, B, H, C]: of the tokens after j to the chunk's end
  total: jax.Array  # [N, B, H]


def _log_weights(log_decay, segments: ChunkSegments | None) -> _LogWeights:
  length = log_decay.shape[-1]
  later = jnp.where(jnp.tri(length, k=-1, dtype=bool), log_decay[..., :, None], 0.0)
  between = jnp.cumsum(later, axis=-2)
  before = log_decay[..., :1] + between[..., :, 0]
  after, total = between[..., -1, :], before[..., -1]
  between = jnp.where(jnp.tri(length, dtype=bool), between, -jnp.inf)
  if segments is not None:
    between, before, after, total = segments.log_weights(between, before, after, total)
  return _LogWeights(between, before, after, total)

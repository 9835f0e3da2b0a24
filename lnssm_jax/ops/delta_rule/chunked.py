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

from lnssm_jax.ops.core import chunk_groups
from lnssm_jax.ops.core.chunking import chunk, chunk_of, join
from lnssm_jax.ops.core.decay_sums import decayed_scores, whole_chunk
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
  log_decay: jax.Array  # [N, B, H, C, 1 or K], float32
  write_key: jax.Array | None  # [N, B, H, C, K]

  @property
  def rated(self) -> jax.Array:
    """beta v, what the write key stores."""
    return self.beta * self.v


class Updates(NamedTuple):
  """Effect of a chunk on a state S, given the corrections x = solve(gram, beta, target - read S):

  S -> exp(log_decay) S + write^T x + added.
  """

  gram: jax.Array  # [N, B, H, C, C], strictly lower: how a correction reaches a later old value
  beta: jax.Array  # [N, B, H, C, 1 or V]
  # [N, B, H, C, V]: v; with a write key minus what it stored earlier in the chunk, as it is read.
  target: jax.Array
  read: jax.Array  # [N, B, H, C, K]
  write: jax.Array  # [N, B, H, C, K]
  log_decay: jax.Array  # [N, B, H, 1 or K, 1]
  added: jax.Array | None  # [N, B, H, K, V]: by the write key


class Reads(NamedTuple):
  """The outputs, given S and x: queries S + scores x + added."""

  queries: jax.Array  # [N, B, H, C, K]
  scores: jax.Array  # [N, B, H, C, C]
  added: jax.Array | None  # [N, B, H, C, V]: what the write key stored in the chunk


def chunked(inputs: Inputs, options: Options) -> tuple[jax.Array, DeltaRuleState]:
  """The chunked form."""
  shared = inputs.beta.shape[-1] == 1
  default = DEFAULT_CHUNK_SIZE if shared else DEFAULT_CHUNK_SIZE_PER_COLUMN
  chunk_size = chunk_of(options.chunk_size or default, inputs.q.shape[1])
  return chunk_groups.run_inputs(functools.partial(_scan, options, chunk_size), inputs, chunk_size)


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def _scan(options, chunk_size, inputs):
  return _forward(options, chunk_size, inputs)[0]


def _forward(options, chunk_size, inputs):
  """Returns (out, final state) and the residuals."""
  chunks = _split(inputs, chunk_size)
  segments = _segments(inputs, chunk_size)
  dtype = inputs.v.dtype
  update = updates(chunks, segments, options.erase_before_decay)
  final, entering, corrections = _carry_states(update, inputs.state.kv, dtype)
  out = read_out(chunks, segments, entering, corrections, dtype)
  out = (options.scale * join(out, inputs.q.shape[1])).astype(dtype)
  return (out, DeltaRuleState(final)), (inputs, entering)


@jax.named_scope("delta_rule")
def _backward(options, chunk_size, residuals, cotangents):
  inputs, entering = residuals
  d_out, (d_final,) = cotangents
  dtype = inputs.v.dtype
  segments, inputs = _segments(inputs, chunk_size), inputs._replace(segments=None)
  chunks, split_vjp = jax.vjp(lambda inputs: _split(inputs, chunk_size), inputs)
  update, updates_vjp = jax.vjp(
    lambda chunks: updates(chunks, segments, options.erase_before_decay), chunks
  )
  corrections, corrections_vjp = jax.vjp(lambda u: _corrections(u, entering, dtype), update)

  _, outputs_vjp = jax.vjp(
    lambda chunks, state, x: read_out(chunks, segments, state, x, dtype),
    chunks,
    entering,
    corrections,
  )
  d_out = d_out.astype(accumulation_dtype(inputs.q, inputs.k, inputs.v))
  d_chunks, d_entering, d_corrections = outputs_vjp(options.scale * chunk(d_out, chunk_size))
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
  """beta_t (target_t - the value that the erase key reads before token t), for every token."""
  old = product("...ck,...kv->...cv", update.read, state, dtype)
  return solve(update.gram, update.beta, update.target - old)


def _carry_states(update: Updates, initial, dtype):
  """The last state, those that enter the chunks, and the corrections."""
  if update.beta.shape[-1] == 1:
    V = update.target.shape[-1]
    both = solve(update.gram, update.beta, jnp.concatenate([update.target, update.read], -1))
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
  write_key = inputs.write_key
  return Chunks(
    q=chunk(inputs.q, size),
    k=chunk(inputs.k, size),
    erase_key=chunk(inputs.erase, size),
    v=chunk(inputs.v, size),
    beta=chunk(inputs.beta, size),
    log_decay=chunk(inputs.log_decay, size),
    write_key=None if write_key is None else chunk(write_key, size),
  )


def _segments(inputs: Inputs, size: int) -> ChunkSegments | None:
  return None if inputs.segments is None else inputs.segments.chunks(size)


def updates(chunks: Chunks, segments: ChunkSegments | None, erase_before_decay: bool) -> Updates:
  """Everything about the change of the state that does not depend on the state."""
  dtype, beta = chunks.v.dtype, chunks.beta
  erase_key, log_decay = chunks.erase_key, chunks.log_decay
  no_own = jnp.zeros(beta.shape[:-1], beta.dtype)

  def reached(keys):
    """[N, B, H, C, C], strictly lower: how much of what keys stored an erase key reads."""
    return _within_documents(
      decayed_scores(
        erase_key, keys, log_decay, dtype, read_first=erase_before_decay, diagonal=no_own
      ),
      segments,
    )

  sums = whole_chunk(log_decay, read_first=erase_before_decay)
  read = erase_key.astype(beta.dtype) * jnp.exp(sums.before)
  if segments is not None:
    read = segments.read(read)
  total = sums.total[..., 0, :]

  def write(keys):
    """(Keys as they reach the leaving state, log decay of the entering one in it)."""
    keys = keys.astype(beta.dtype) * jnp.exp(sums.after)
    return (keys, total) if segments is None else segments.write(keys, total)

  keys, total = write(chunks.k)
  target, added = chunks.v.astype(beta.dtype), None
  if chunks.write_key is not None:
    target = -product("...ij,...jv->...iv", reached(chunks.write_key), chunks.rated, dtype)
    added = product("...ck,...cv->...kv", write(chunks.write_key)[0], chunks.rated, dtype)
  return Updates(reached(chunks.k), beta, target, read, keys, total[..., None], added)


def reads(chunks: Chunks, segments: ChunkSegments | None) -> Reads:
  """Everything about the outputs that does not depend on the state."""
  dtype = chunks.v.dtype

  def scores(keys):
    return _within_documents(decayed_scores(chunks.q, keys, chunks.log_decay, dtype), segments)

  queries = chunks.q.astype(chunks.beta.dtype) * jnp.exp(whole_chunk(chunks.log_decay).before)
  if segments is not None:
    queries = segments.read(queries)
  added = None
  if chunks.write_key is not None:
    added = product("...ij,...jv->...iv", scores(chunks.write_key), chunks.rated, dtype)
  return Reads(queries, scores(chunks.k), added)


def _within_documents(scores, segments):
  return scores if segments is None else segments.scores(scores)


def advance(update: Updates, state, corrections, dtype):
  """The state after a chunk."""
  # Transposed, because XLA on CPUs has no bfloat16 product for the layout that it chooses otherwise
  # where keys and decays have fewer heads than values.
  written = product("...cv,...ck->...vk", corrections, update.write, dtype).swapaxes(-1, -2)
  state = decayed(update.log_decay, state) + written
  return state if update.added is None else state + update.added


def read_out(chunks: Chunks, segments: ChunkSegments | None, state, corrections, dtype):
  """The outputs of all chunks; heads of queries may share all else."""

  def read(q):
    return outputs(reads(chunks._replace(q=q), segments), state, corrections, dtype)

  return over_readers(read, chunks.k.shape[2], (chunks.q, 2))


def outputs(read: Reads, state, corrections, dtype):
  """S_t^T q_t [N, B, H, C, V]."""
  from_state = product("...ck,...kv->...cv", read.queries, state, dtype)
  out = from_state + product("...ij,...jv->...iv", read.scores, corrections, dtype)
  return out if read.added is None else out + read.added

"""Decays that all key channels of a head share: small tables that the kernels of chunks read."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries
from pallas_kernels.core.chunk_grid import launch_per_chunk
from pallas_kernels.core.index import ChunkIndex
from pallas_kernels.core.wgmma import (
  COL_LAYOUT,
  WITHOUT_BARRIERS,
  Backend,
  Ref,
  broadcast_cols,
  causal_mask,
  iota,
  load_col_vector,
  load_row_vector,
  store_unoptimized,
  traced_once,
)

# exp(-80) = 2e-35: float32 sums do not notice anything smaller.
SMALLEST_LOG_DECAY = -80.0


class ScalarDecayTables(NamedTuple):
  """Vectors of each chunk for decays that all key channels share, all float32.

  The small sizes are used where all chunks are alike. The reset at document boundaries is part of
  all but `cumulative`.
  """

  # Log decays summed to each token from the chunk's start, or its document's.
  cumulative: Any  # [B|1, H, T|C]
  before: Any  # [B|1, H, T|C]: decay of the entering state at each token
  after: Any  # [B|1, H, T|C]: decay of each token in the leaving state
  total: Any  # [B|1, H, N|1]: decay of the state over the chunk


def scalar_decay_tables(
  log_decay: jax.Array,  # [1, 1, H] or [B, T, H] float32
  documents: DocumentBoundaries,
  *,
  length: int,
  padded: int,
  chunk: int,
) -> ScalarDecayTables:
  """Tables of `log_decay`, for `length` tokens padded to `padded`, a multiple of `chunk`.

  By XLA, which also differentiates them; `token_decay_tables` is one kernel, for Hopper.
  """
  C = chunk
  log_decay = jnp.maximum(log_decay, SMALLEST_LOG_DECAY).transpose(0, 2, 1)
  # Else XLA reads across memory, once for each sum of the tables, what one transpose makes.
  log_decay = lax.optimization_barrier(log_decay)
  rows, H, tokens = log_decay.shape
  if tokens == 1:  # sums are counts
    tokens = C if length == padded and documents.reset_ids is None else padded
    i = jnp.arange(tokens).reshape(-1, C)
    first = i[:, :1]
    stop = jnp.minimum(first + C, length)
    so_far = jnp.clip(stop - first, 0, i + 1 - first)  # none in a chunk of padding
    cumulative = so_far * log_decay[..., None]
    later = jnp.maximum(stop - 1 - i, 0) * log_decay[..., None]
    total = so_far[:, -1] * log_decay
  else:
    tokens = padded
    chunks = jnp.pad(log_decay, ((0, 0), (0, 0), (0, padded - length))).reshape(rows, H, -1, C)
    cumulative = jnp.cumsum(chunks, axis=-1)
    from_end = lax.cumsum(chunks, axis=3, reverse=True)
    later = jnp.concatenate([from_end[..., 1:], jnp.zeros_like(from_end[..., :1])], axis=-1)
    total = cumulative[..., -1]
  cumulative, later = cumulative.reshape(rows, H, tokens), later.reshape(rows, H, tokens)
  before, after, total = jnp.exp(cumulative), jnp.exp(later), jnp.exp(total)
  if documents.reset_ids is not None:
    sees, reaches = documents.in_chunks(C)
    of_tokens = lambda x: x.reshape(-1, 1, tokens)
    before, after = before * of_tokens(sees), after * of_tokens(reaches)
    total = total * sees[:, None, :, -1]
  return ScalarDecayTables(cumulative, before, after, total)


_HEADS = 8  # of which a kernel reads the numbers of a token together


def padded_numbers(x: jax.Array, *, tokens: int) -> jax.Array:
  """A number per token and head [B, length, H] for `load_number`, with zeros for padding."""
  _, length, H = x.shape
  return jnp.pad(x, ((0, 0), (0, tokens - length), (0, -H % _HEADS)))


def load_number(x_gmem: Ref, at: ChunkIndex) -> jax.Array:
  """The chunk's numbers, of `padded_numbers`, as a row vector."""
  heads = pl.ds(lax.div(at.head, _HEADS) * _HEADS, _HEADS)
  source = x_gmem.at[at.batch, at.tokens, heads]
  numbers = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
  own = iota(numbers.shape, 1) == lax.rem(at.head, _HEADS)
  return jnp.sum(jnp.where(own, numbers, 0.0), axis=1)


def chunk_decays(
  log_decay: jax.Array, at: ChunkIndex, documents: DocumentBoundaries
) -> ScalarDecayTables:
  """In a kernel, the tables of a chunk as row vectors, of its log decays as a column vector."""
  states = documents.load_states(at)
  if states is None:
    return _chunk_decays(log_decay, at, DocumentBoundaries.of(None))
  ways = (
    functools.partial(_chunk_decays, at=at, documents=x)
    for x in (documents, DocumentBoundaries.of(None))
  )
  return lax.cond(states.cut, *ways, log_decay)


def _chunk_decays(log_decay, at: ChunkIndex, documents: DocumentBoundaries) -> ScalarDecayTables:
  log_decay = jnp.maximum(log_decay, SMALLEST_LOG_DECAY)
  log_decay, so_far = broadcast_cols(log_decay, (at.size,) * 2), causal_mask(at.size)
  # Selected, not multiplied: NaN reaches no earlier token, and nothing another document.
  same = documents.same_document(at)
  log_decay = log_decay if same is None else jnp.where(same, log_decay, 0.0)
  cumulative = jnp.sum(jnp.where(so_far, log_decay, 0.0), axis=1)
  later = jnp.sum(jnp.where(so_far, 0.0, log_decay), axis=1)
  before, after, total = jnp.exp(cumulative), jnp.exp(later), jnp.exp(cumulative + later)
  if documents.reset_ids is not None:
    before = before * documents.sees_entering_state(at)
    after = after * documents.reaches_leaving_state(at)
    total = jnp.where(total < 0.0, total, 0.0)  # 0, also for NaN: a document begins here
  return ScalarDecayTables(cumulative, before, after, total)


class OfSums(NamedTuple):
  """In a kernel, cotangents of the sums of a chunk's log decays."""

  cumulative: jax.Array  # [C]: from the chunk's start to each token
  later: jax.Array  # [C]: over the tokens after each one
  total: Sequence[jax.Array]  # column vectors [C]: over the chunk, in parts to be added up


def log_decay_gradient(
  load: Callable[[ChunkIndex, Any], OfSums],
  arrays: Any,
  documents: DocumentBoundaries,
  *,
  shape: tuple[int, int, int],
  chunk: int,
  name: str,
  backend: Backend,
) -> jax.Array:
  """The gradient of log decays, `shape` [B, H, T] float32, in one kernel.

  `load(at, arrays_gmem)` has the cotangents of a chunk.
  """
  _, H, T = shape

  def body(at, gmem, out, vectors_smem):
    arrays, documents = gmem
    d = load(at, arrays)
    rows = [vectors_smem.at[pl.ds(start, chunk)] for start in (0, chunk)]
    for row, value in zip(rows, (d.cumulative, d.later), strict=True):
      row[...] = value
    plgpu.commit_smem()
    up_to, after = (broadcast_cols(load_col_vector(row), (chunk,) * 2) for row in rows)
    # Rows are decays, columns the tokens whose sums have them.
    gradient = jnp.where(causal_mask(chunk, transposed=True), up_to, after)
    gradient = documents.mask_scores(at, gradient, documents.load_states(at))
    whole = broadcast_cols(functools.reduce(jnp.add, d.total), gradient.shape)
    total = jnp.sum(gradient + whole, axis=1)
    store_unoptimized(out.at[at.batch, at.head, at.tokens], total)

  return launch_per_chunk(
    body,
    (arrays, documents),
    jax.ShapeDtypeStruct(shape, jnp.float32),
    plgpu.SMEM((2 * chunk,), jnp.float32),
    sizes=(1, T // chunk, H, shape[0]),
    chunk=chunk,
    name=name,
    backend=backend,
    compiler_params=WITHOUT_BARRIERS,
  )


@traced_once("heads", "chunk", "backend")
def token_decay_tables(
  log_decay: jax.Array,  # of `padded_numbers`
  documents: DocumentBoundaries,
  *,
  heads: int,
  chunk: int,
  backend: Backend,
) -> ScalarDecayTables:
  """`scalar_decay_tables` of decays per token, in one kernel."""
  B, T, _ = log_decay.shape

  def body(at, gmem, outs: ScalarDecayTables, rows_smem):
    log_decay_gmem, documents = gmem
    rows_smem.at[0][...] = load_number(log_decay_gmem, at)
    plgpu.commit_smem()
    decays = chunk_decays(load_col_vector(rows_smem.at[0]), at, documents)
    for name in ("cumulative", "before", "after"):
      target = getattr(outs, name).at[at.batch, at.head, at.tokens]
      store_unoptimized(target, getattr(decays, name))
    rows_smem.at[1][...] = decays.total
    plgpu.commit_smem()
    outs.total[at.batch, at.head, at.chunk] = rows_smem[1, 0]

  vector = jax.ShapeDtypeStruct((B, heads, T), jnp.float32)
  total = jax.ShapeDtypeStruct((B, heads, T // chunk), jnp.float32)
  return launch_per_chunk(
    body,
    (log_decay, documents),
    ScalarDecayTables(vector, vector, vector, total),
    plgpu.SMEM((2, chunk), jnp.float32),
    sizes=(1, T // chunk, heads, B),
    chunk=chunk,
    name="decay_tables",
    backend=backend,
    compiler_params=WITHOUT_BARRIERS,
  )


class TableGradients(NamedTuple):
  """Cotangents of `ScalarDecayTables`, or their GMEM references."""

  later: Any  # [B, H, T]: of `cumulative` is later - earlier
  earlier: Any
  before: Any  # [B, H, T]
  after: Any
  total: Any  # [B, H, N]: that of the log decay over the chunk


@traced_once("chunk", "backend")
def token_decay_gradient(
  tables: ScalarDecayTables,
  d_tables: TableGradients,
  documents: DocumentBoundaries,
  *,
  chunk: int,
  backend: Backend,
) -> jax.Array:
  """[B, H, T]: the gradient of log decays that stay above their bound, through their tables."""

  def load(at, gmem):
    tables, d_tables = gmem
    row = lambda ref: load_row_vector(ref.at[at.batch, at.head, at.tokens])
    cumulative = row(d_tables.later) - row(d_tables.earlier)
    cumulative = cumulative + row(d_tables.before) * row(tables.before)
    later = row(d_tables.after) * row(tables.after)
    total = d_tables.total[at.batch, at.head, at.chunk] / chunk
    total = plgpu.layout_cast(lax.broadcast(total, (chunk,)), COL_LAYOUT)
    return OfSums(cumulative, later, [total])

  return log_decay_gradient(
    load,
    (tables, d_tables),
    documents,
    shape=tables.before.shape,
    chunk=chunk,
    name="decay_tables_gradient",
    backend=backend,
  )

"""Tokens sorted by partition.

Per sample, the S T copies of the tokens are sorted by (partition, position). Without an initial
state they are one sequence, in which every partition's run is a document (`_one_sequence`).

An initial state, and the states after the last token, are exchanged chunk by chunk: each run is
padded to whole chunks. The chunks of a run are consecutive, so that one state at a time is carried
from chunk to chunk: it is replaced by the next partition's initial state where a run begins. The
recurrence inside then computes the outputs of all chunks at once; the delta rule, whose chunks have
no short summary, chunk by chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.core.precision import accumulation_dtype, decayed, product
from lnssm_jax.ops.sparse_state_attention.inside import recurrence
from lnssm_jax.ops.sparse_state_attention.types import Inputs, Options, SparseState
from pallas_kernels.core.gradients import custom_vjp

DEFAULT_CHUNK_SIZE = 64


def varlen(inputs: Inputs, options: Options):
  """Work and memory of S T tokens, whatever N."""
  (_, T, S), N = inputs.indices.shape, inputs.state.kv.shape[1]
  runs = _lay_out(inputs.indices, N, run_chunk_size(T, S, N, options.chunk_size))
  out, kv = _in_chunks(inputs, options, runs)  # dead code where the states are not used
  if out is None:
    # With the kernels, whole chunks would cost up to N C rows.
    tight = options.implementation is None
    out = _one_sequence(inputs, options, _tight_rows(inputs.indices, N) if tight else runs)
  return out, SparseState(kv)


class _Rows(NamedTuple):
  """Indices of a sorted layout of R rows. An index out of range is of no row."""

  copy: jax.Array  # [B, R]: the copy t S + s in each row
  place: jax.Array  # [B, T S]: the row of each copy
  last_copy: jax.Array  # [B, R]: the copy in each row, in padding the last one before it


def _tight_rows(indices, N) -> _Rows:
  """The copies, sorted; those that select nothing are last."""
  partition = indices.reshape(indices.shape[0], -1)
  copies = partition.shape[1]
  number = jnp.arange(copies, dtype=jnp.int32)
  if (N + 1) * copies < 2**31:
    # Keys alone, all different: a GPU sorts them faster than keys with values.
    order = jnp.sort(partition * copies + number, axis=1) % copies
  else:
    order = jnp.argsort(partition, axis=1, stable=True).astype(jnp.int32)
  invert = lambda order: jnp.zeros_like(order).at[order].set(number, unique_indices=True)
  return _Rows(order, jax.vmap(invert)(order), order)


def _one_sequence(inputs: Inputs, options: Options, rows):
  """The output where no state enters: one sequence of all rows, in which each run is a document."""
  q, k, v, indices, write, read, log_decay, beta, _, segments = inputs
  B, T, S = indices.shape
  acc = accumulation_dtype(q, k, v)
  arrange = lambda x: _arrange(x.reshape(B, -1, *x.shape[3:]), rows.copy, rows.place)
  gated = lambda x: arrange((write.astype(acc)[..., None, None] * x.astype(acc)).astype(x.dtype))
  if log_decay is not None:
    constant = log_decay.shape[:3] == (1, 1, 1)
    log_decay = log_decay[0, 0, 0] if constant else arrange(log_decay)
  of_row = [jnp.take_along_axis(indices.reshape(B, T * S), rows.last_copy, axis=1)]
  if segments is not None:
    of_row.append(jnp.take_along_axis(segments.index, rows.last_copy // S, axis=1))
  begins = functools.reduce(jnp.logical_or, [x[:, 1:] != x[:, :-1] for x in of_row])
  out, _ = recurrence(
    arrange(q[:, :, None]),
    gated(k) if beta is None else arrange(k),
    arrange(v),
    log_decay,
    None if beta is None else gated(beta),
    options,
    segment_ids=jnp.pad(jnp.cumsum(begins, axis=1, dtype=jnp.int32), ((0, 0), (1, 0))),
    chunk_size=options.chunk_size,
  )
  out = _move(out, rows.place, rows.copy).reshape(B, T, S, *out.shape[2:])
  # What selects nothing is 0; the query's gate as a factor of its output costs no rounding.
  selected = (indices < inputs.state.kv.shape[1])[..., None, None]
  return jnp.sum(read.astype(acc)[..., None, None] * jnp.where(selected, out.astype(acc), 0.0), 2)


@custom_vjp
def _arrange(x, copy, place):
  """The copies of x [B, T|T S, ...] in their rows, 0 in rows of none: T rows have S copies each.

  `place` is the inverse of `copy`. With it the transpose is a gather and a sum over S; autodiff
  would scatter.
  """
  repeats = place.shape[1] // x.shape[1]
  return _rows(x, copy // repeats)


def _arrange_forward(x, copy, place):
  return _arrange(x, copy, place), (copy, place, jnp.zeros((x.shape[1], 0), x.dtype))


def _arrange_backward(residuals, d_y):
  copy, place, like = residuals
  d_copies = _rows(d_y, place).reshape(d_y.shape[0], like.shape[0], -1, *d_y.shape[2:])
  d_x = jnp.sum(d_copies, axis=2, dtype=accumulation_dtype(d_y)).astype(like.dtype)
  return d_x, _no_gradient(copy), _no_gradient(place)


_arrange.defvjp(_arrange_forward, _arrange_backward)


def _in_chunks(inputs: Inputs, options: Options, runs: "_Runs"):
  """(Output, states after the last token [B, N, H, K, V]), with runs of whole chunks.

  With `options.fresh` the output is None.
  """
  q, k, v, indices, write, read, log_decay, beta, state, segments = inputs
  (B, T, S), (H, K, V) = indices.shape, state.kv.shape[2:]
  acc = accumulation_dtype(q, k, v)
  size = runs.copy.shape[1] // runs.chunks
  in_chunks = lambda x: x.reshape(-1, size, *x.shape[2:])  # [B, M C, ...] -> [B M, C, ...]
  by_sample = lambda x: x.reshape(B, -1, *x.shape[1:])  # [B M, ...] -> [B, M, ...]

  def arrange(x):
    """[B, T, S|1, H, X] -> [B M, C, H, X], zeros in the padding."""
    x = jnp.broadcast_to(x, (B, T, S, *x.shape[3:]))
    return in_chunks(_move(x.reshape(B, T * S, *x.shape[3:]), runs.copy, runs.place))

  gated = lambda gate, x: arrange(
    (gate.astype(acc)[..., None, None] * x.astype(acc)).astype(x.dtype)
  )
  queries, values = gated(read, q[:, :, None]), arrange(v)
  keys = gated(write, k) if beta is None else arrange(k)
  if log_decay is None:
    decays = None
  elif log_decay.shape[:3] == (1, 1, 1):
    filled = in_chunks(runs.copy < T * S)
    decays = jnp.where(filled[..., None, None], log_decay[0, 0, 0], 0.0)
  else:
    decays = arrange(log_decay)
  boundaries = None if segments is None else _boundaries(runs, segments.index, S, size)
  document = None if boundaries is None else boundaries.document

  if beta is None:
    total, added = _summaries(keys, values, decays, boundaries)
    entering, leaving = _carry(by_sample(total), by_sample(added), state.kv, runs)
    out = None
    if not options.fresh:
      initial = entering.reshape(-1, H, K, V)
      if boundaries is not None:
        initial = jnp.where(boundaries.reaches_first[:, None, None, None], initial, 0.0)
      rest = {"initial": initial, "segment_ids": document, "chunk_size": size}
      out, _ = recurrence(queries, keys, values, decays, None, options, **rest)
  else:
    arrays = (queries, keys, values, decays, gated(write, beta), boundaries)
    arrays = jax.tree.map(by_sample, arrays)
    out, leaving = _chunk_by_chunk(arrays, state.kv, runs, options, size)
    out = None if options.fresh else out
  if out is not None:
    out = _move(out.reshape(B, -1, H, V), runs.place, runs.copy)
    out = out.reshape(B, T, S, H, V).astype(acc).sum(2)

  used = (runs.last < runs.chunks)[..., None, None, None]
  kv = jnp.where(used, _move(leaving, runs.last, runs.last_of), state.kv)
  if segments is not None and document is not None:
    seen = jnp.take_along_axis(by_sample(document)[..., -1], runs.last, 1, mode="clip")
    seen = jnp.where(runs.last < runs.chunks, seen, 0)
    kv = jnp.where((seen == segments.index[:, -1:])[..., None, None, None], kv, 0.0)
  return out, kv


def _chunk_by_chunk(arrays, initial, runs, options, size):
  """(Output [B, M, C, H, V], the states that leave the chunks) of arrays [B, M, ...]."""
  initial = _move(initial, runs.first_of, runs.first)

  def step(state, chunk):
    begins, initial_m, (q, k, v, log_decay, beta, boundaries) = chunk
    state = jnp.where(begins[:, None, None, None], initial_m, state)
    document = None
    if boundaries is not None:
      document = boundaries.document
      state = jnp.where(boundaries.reaches_first[:, None, None, None], state, 0.0)
    rest = {"initial": state, "segment_ids": document, "chunk_size": size}
    out, state = recurrence(q, k, v, log_decay, beta, options, **rest)
    return state, (out, state)

  by_chunk = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (runs.begins, initial, arrays))
  _, results = jax.lax.scan(step, initial[:, 0], by_chunk)
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), results)


def run_chunk_size(T, S, N, chunk_size=None):
  """Tokens per chunk: by default 64, or the mean length of a run if that is less."""
  mean = max(1, -(-S * T // N))
  return chunk_size or min(DEFAULT_CHUNK_SIZE, 1 << (mean - 1).bit_length())


def chunk_count(T, S, N, size):
  """The largest number of chunks that runs of S T copies in N partitions can have.

  Each of the at most min(N, S T) runs wastes at most size - 1 tokens.
  """
  return (S * T + min(N, S * T) * (size - 1)) // size


class _Runs(NamedTuple):
  """Indices of the sorted layout: M chunks of C tokens. An index out of range is of no row."""

  copy: jax.Array  # [B, M C]: the copy t S + s at each place
  place: jax.Array  # [B, T S]: the place of each copy
  last_copy: jax.Array  # [B, M C]: the copy at each place, in padding the last one before it
  begins: jax.Array  # [B, M]: whether the chunk is the first of a run
  first_of: jax.Array  # [B, M]: the partition whose run begins with the chunk
  last_of: jax.Array  # [B, M]: the partition whose run ends with it
  first: jax.Array  # [B, N]: the first chunk of each partition
  last: jax.Array  # [B, N]: the last one

  @property
  def chunks(self):
    return self.begins.shape[1]


def _lay_out(indices, N, size) -> _Runs:
  B, T, S = indices.shape
  copies, chunks = T * S, chunk_count(T, S, N, size)

  @jax.vmap
  def one(partition):
    order = jnp.argsort(partition, stable=True).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(copies, dtype=jnp.int32))
    bounds = jnp.searchsorted(partition[order], jnp.arange(N + 1, dtype=jnp.int32))
    start, count = bounds[:-1].astype(jnp.int32), jnp.diff(bounds).astype(jnp.int32)
    end = jnp.cumsum(-(-count // size), dtype=jnp.int32)  # the chunk after each partition's last
    first = jnp.pad(end, (1, 0))[:-1]

    chunk = jnp.arange(chunks, dtype=jnp.int32)
    owner = jnp.searchsorted(end, chunk, side="right").astype(jnp.int32)  # N: no partition's
    own = jnp.minimum(owner, N - 1)
    step = (chunk - first[own])[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    filled = (owner < N)[:, None] & (step < count[own][:, None])
    at = lambda step: order[jnp.clip(start[own][:, None] + step, 0, copies - 1)].reshape(-1)
    begins = chunk == first[own]
    ends = chunk + 1 == end[own]
    to = jnp.minimum(partition, N - 1)
    place = first[to] * size + rank - start[to]
    return _Runs(
      copy=jnp.where(filled.reshape(-1), at(step), copies),
      place=jnp.where(partition < N, place, chunks * size),
      last_copy=at(jnp.minimum(step, count[own][:, None] - 1)),
      begins=begins,
      first_of=jnp.where(begins & (owner < N), owner, N),
      last_of=jnp.where(ends & (owner < N), owner, N),
      first=jnp.where(count > 0, first, chunks),
      last=jnp.where(count > 0, end - 1, chunks),
    )

  return one(indices.reshape(B, copies))


@custom_vjp
def _move(x, source, target):
  """y[b, i] = x[b, source[b, i]], or 0 where there is no such row.

  `target` is the inverse: where in y each row of x is. With it the transpose is a gather too;
  autodiff would scatter.
  """
  del target
  return _rows(x, source)


def _move_forward(x, source, target):
  return _move(x, source, target), (source, target)


def _move_backward(residuals, d_y):
  source, target = residuals
  return _move(d_y, target, source), _no_gradient(source), _no_gradient(target)


_move.defvjp(_move_forward, _move_backward)


def _rows(x, index):
  return jax.vmap(lambda x, i: x.at[i].get(mode="fill", fill_value=0))(x, index)


def _no_gradient(index):
  return np.zeros(index.shape, jax.dtypes.float0)


class _Boundaries(NamedTuple):
  """Document boundaries in the sorted layout. M chunks per sample."""

  document: jax.Array  # [B M, C]; of padding that of the last token before it
  reaches_first: jax.Array  # [B M]: whether the entering state reaches the chunk's first token
  passes: jax.Array  # [B M]: whether it passes the whole chunk


def _boundaries(runs, index, S, size) -> _Boundaries:
  B = index.shape[0]
  document = jnp.take_along_axis(index, runs.last_copy // S, axis=1).reshape(B, -1, size)
  # An initial state belongs to the first document.
  before = jnp.pad(document[:, :-1, -1], ((0, 0), (1, 0)))
  before = jnp.where(runs.begins, 0, before)
  same = lambda i: (document[..., i] == before).reshape(-1)
  return _Boundaries(document.reshape(-1, size), same(0), same(-1))


def _summaries(keys, values, log_decay, boundaries):
  """Affine map of the state by each chunk, S -> exp(total) S + added.

  total [B M, H|1, K|1]; added [B M, H, K, V].
  """
  if log_decay is None:
    total = jnp.zeros((keys.shape[0], 1, 1), keys.dtype)
  else:
    # Sums towards the chunk's end: terms of one sign, no differences.
    sums = jnp.flip(jnp.cumsum(jnp.flip(log_decay, 1), axis=1), 1)
    keys = keys * jnp.exp(jnp.pad(sums[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0))))
    total = sums[:, 0]
  if boundaries is not None:
    document = boundaries.document
    keys = jnp.where((document == document[:, -1:])[..., None, None], keys, 0.0)
    total = jnp.where(boundaries.passes[:, None, None], total, -jnp.inf)
  return total, product("bchk,bchv->bhkv", keys, values, values.dtype)


def _carry(total, added, initial, runs):
  """The states that enter and leave the chunks, [B, M, H, K, V] each.

  total [B, M, H|1, K|1]; added [B, M, H, K, V]; initial [B, N, H, K, V].
  """
  initial = _move(initial, runs.first_of, runs.first)

  def step(state, chunk):
    begins, initial_m, total_m, added_m = chunk
    state = jnp.where(begins[:, None, None, None], initial_m, state)
    return decayed(total_m[..., None], state) + added_m, state

  by_chunk = [jnp.moveaxis(x, 1, 0) for x in (runs.begins, initial, total, added)]
  _, entering = jax.lax.scan(step, initial[:, 0], by_chunk)
  entering = jnp.moveaxis(entering, 0, 1)
  return entering, decayed(total[..., None], entering) + added

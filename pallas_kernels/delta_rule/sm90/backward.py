"""Backward pass of the delta rule over chunks.

First `recurrence.reverse_recurrence` carries the cotangent of the state against time; then each
chunk is independent, and the kernels below run in one CTA per chunk. With S the state that enters
the chunk, A the cotangent of the one that leaves it, G that of out, x and y as in `recurrence.py`,
m = beta y, weight_ij the decay between tokens j and i:

    dP_ij = weight_ij G_i . x_j    j <= i        dL_ij = -weight_ij m_i . x_j     j < i
    dq_i  = before_i S G_i + sum_j dP_ij k_j     de_i  = -before_i S m_i + sum_j dL_ij k_j
    dk_j  = after_j A x_j + sum_i (dP_ij q_i + dL_ij e_i)      dv_i = m_i
    dbeta_i = y_i . (v_i - before_i S^T e_i) - sum_j L_ij y_i . x_j

Two CTAs share an SM and its memory, but for dk and dv where the erase key is k, which take 115 KiB.
So what is needed late is loaded late, into a tile that is dead by then, and results replace
arguments.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries
from pallas_kernels.core.chunk_grid import (
  decay_between_tokens,
  launch_per_chunk,
  load_inputs,
  shared_head,
  store_outputs,
  sum_of_groups,
)
from pallas_kernels.core.wgmma import (
  TILE_WIDTH,
  Backend,
  Dots,
  broadcast_cols,
  broadcast_rows,
  causal_mask,
  load_col_vector,
  load_row_vector,
  load_tile,
  map_refs,
  smem_tile,
  store_unoptimized,
  transpose_ref,
  with_int32_indices,
)
from pallas_kernels.delta_rule.sm90.recurrence import Stage, reverse_recurrence
from pallas_kernels.delta_rule.types import (
  AFTER,
  BEFORE,
  CUMULATIVE,
  DECAY,
  NUM_ROWS,
  RATE,
  Inputs,
  Options,
  chunk_tables,
)


def backward(
  options: Options,
  inputs: Inputs,
  segments: jax.Array | None,
  kept: Any,  # `Residuals`
  cotangents: Sequence[jax.Array | None],  # of the results of `op.delta_rule`; None: zeros
  decays: bool,  # whether the decay wants a gradient
) -> Inputs:
  """Gradients of the inputs."""
  q, k, erase_key, v, beta, log_decay, kv = inputs
  d_out, d_last = cotangents
  (B, T, *_), H = q.shape, inputs.heads
  d_out = jnp.zeros((B, T, H, v.shape[3]), v.dtype) if d_out is None else d_out
  # `scale` multiplies the results.
  d_last = None if d_last is None else d_last / options.scale
  C = options.config.chunk
  documents = DocumentBoundaries.of(segments, C)
  tables, tables_vjp = jax.vjp(
    functools.partial(chunk_tables, options, documents, T), beta, log_decay
  )
  adjoints = reverse_recurrence(
    Stage(erase_key, kept.inverse, k, q, kept.scores, d_out, tables),
    d_last,
    heads=inputs.heads,
    config=options.config.reverse,
    chunk=C,
    backend=options.backend,
  )
  keywords = {"scale": options.scale, "decays": decays, "chunk": C, "backend": options.backend}
  y = adjoints.corrections
  by_q = query_gradient(
    QueryArrays(
      QueryTiles(k, d_out, kept.x, y, q if decays else None, erase_key),
      v,
      kept.states,
      tables,
      documents,
    ),
    **keywords,
  )
  shared = erase_key is None
  by_k = key_value_gradient(
    KeyArrays(
      KeyTiles(
        q,
        d_out,
        kept.x,
        y,
        k if decays or shared else None,
        erase_key,
        d_erase_key=by_q.erase_key if shared else None,
      ),
      adjoints.states,
      tables,
      documents,
    ),
    **keywords,
  )
  rows = {RATE: by_q.rate}
  if decays:
    rows |= {BEFORE: by_q.before, AFTER: by_k.after}
    rows[CUMULATIVE] = by_q.later - by_q.earlier
  d_tables = jnp.zeros_like(tables)
  of_groups = lambda d: d.reshape(B, tables.shape[1], -1, *d.shape[2:]).sum(2)  # heads share tables
  for row, d in rows.items():
    d_tables = d_tables.at[:, :, :, row].set(of_groups(d.reshape(B, H, -1, C)))
  if decays:
    overlap = jnp.einsum(
      "bhnkv,bhnkv->bhn", kept.states, adjoints.states, preferred_element_type=jnp.float32
    )
    d_tables = d_tables.at[:, :, :, DECAY, 0].set(of_groups(overlap))
  d_beta, d_log_decay = tables_vjp(options.scale * d_tables)
  d_kv = None if kv is None else options.scale * adjoints.last_state
  d_erase_key = None if shared else by_q.erase_key
  d_inputs = Inputs(by_q.q, by_k.k, d_erase_key, by_k.v, d_beta, d_log_decay, d_kv)
  summed = {
    name: sum_of_groups(getattr(d_inputs, name), like)
    for name, like in (("q", q), ("k", k), ("erase_key", erase_key), ("v", v))
    if like is not None
  }
  return d_inputs._replace(**summed)


class QueryTiles(NamedTuple):
  """Inputs that `query_gradient` loads first: arrays, GMEM references or tiles [C, K], [C, V]."""

  k: Any  # [B, T, H, K] bfloat16
  d_out: Any  # [B, T, H, V] bfloat16: G
  x: Any  # [B, T, H, V] bfloat16
  y: Any  # [B, T, H, V] bfloat16
  q: Any  # [B, T, H, K] bfloat16; only for decays, but its tile is also for the result
  erase_key: Any  # [B, T, H, K] bfloat16, or None for k


class QueryArrays(NamedTuple):
  """Arguments of `query_gradient`, or their GMEM references."""

  tiles: QueryTiles
  v: Any  # [B, T, H, V] bfloat16
  states: Any  # [B, H, N, K, V] bfloat16: S
  tables: Any  # [B, H, N, NUM_ROWS, C] float32
  documents: DocumentBoundaries


class QueryOutputs(NamedTuple):
  """Results of `query_gradient`. [B, H, T] float32 without `scale`; the last three for decays."""

  q: Any  # dq [B, T, H, K] bfloat16
  erase_key: Any  # de [B, T, H, K] bfloat16
  rate: Any  # of the tables
  before: Any
  later: Any  # of CUMULATIVE: + later - earlier
  earlier: Any


class _Buffers(NamedTuple):
  tiles: Any
  state: Any  # [64, V]: of the first block of key channels
  tables: Any  # [NUM_ROWS, C] float32
  lhs_q: Any  # of `Backend.to_lhs`
  lhs_e: Any
  arrived_barrier: Any
  late_barrier: Any  # of what is loaded late: the other block of the state; v


def _buffers(tiles, num_late, C, backend):
  V = tiles.x.shape[-1]
  present = sum(x is not None for x in tiles)
  return _Buffers(
    tiles=map_refs(lambda x: smem_tile(C, x.shape[-1]), tiles),
    state=smem_tile(TILE_WIDTH, V),
    tables=plgpu.SMEM((NUM_ROWS, C), jnp.float32),
    lhs_q=backend.lhs_scratch(C, C),
    lhs_e=backend.lhs_scratch(C, C),
    arrived_barrier=plgpu.Barrier(num_barriers=present + 2),
    late_barrier=plgpu.Barrier(num_barriers=num_late),
  )


def _load_first(at, tiles_gmem, state_gmem, tables_gmem, smem):
  """Loads tiles, the first block of the state and the chunk's table."""
  H = tiles_gmem.x.shape[2]
  copies = [
    (source.at[at.batch, at.tokens, shared_head(at.head, H, source)], target)
    for source, target in zip(tiles_gmem, smem.tiles, strict=True)
    if source is not None
  ]
  copies.append((state_gmem, smem.state))
  table_gmem = tables_gmem.at[at.batch, shared_head(at.head, H, tables_gmem, axis=1), at.chunk]
  copies.append((table_gmem, smem.tables))
  load_inputs(copies, smem.arrived_barrier)


@with_int32_indices
def query_gradient(
  arrays: QueryArrays, *, scale: float, decays: bool, chunk: int, backend: Backend
) -> QueryOutputs:
  """dq, the gradient of the erase key, and those of the tables; with `decays` all of them."""
  (B, T, _, K), H = arrays.tiles.k.shape, arrays.tiles.x.shape[2]
  C, shared = chunk, arrays.tiles.erase_key is None
  blocks = [pl.ds(start, TILE_WIDTH) for start in range(0, K, TILE_WIDTH)]

  def body(at, gmem: QueryArrays, outs: QueryOutputs, smem: _Buffers):
    tiles, late_barrier = smem.tiles, smem.late_barrier
    state_of = lambda channels: gmem.states.at[at.batch, at.head, at.chunk, channels]
    _load_first(at, gmem.tiles, state_of(blocks[0]), gmem.tables, smem)
    erase_smem = tiles.k if shared else tiles.erase_key
    strictly_earlier = causal_mask(C, strict=True)
    mask = gmem.documents.mask(at, causal_mask(C))
    weight = jnp.where(mask, decay_between_tokens(smem.tables.at[CUMULATIVE]), 0.0)
    rate, before = (load_row_vector(smem.tables.at[row]) for row in (RATE, BEFORE))
    store = lambda ref, value: store_unoptimized(ref.at[at.batch, at.head, at.tokens], value)

    products = [Dots([(tiles.d_out, transpose_ref(tiles.x))])]
    if decays:
      products.append(Dots([(tiles.q, transpose_ref(tiles.k))]))
    d_scores, *scores = backend.dots(*products)
    d_scores = d_scores * weight
    lhs_q = backend.to_lhs(d_scores, smem.lhs_q)
    gram, d_gram = backend.dots(
      Dots([(erase_smem, transpose_ref(tiles.k))]), Dots([(tiles.y, transpose_ref(tiles.x))])
    )
    late_state_smem = tiles.x  # x is dead: its last product is done
    for channels in blocks[1:]:
      plgpu.copy_gmem_to_smem(state_of(channels), late_state_smem, late_barrier.at[0])
    d_gram = jnp.where(strictly_earlier, d_gram * weight, 0.0)
    products = gram * d_gram  # L_ij y_i . x_j
    d_rate = -jnp.sum(products, axis=1)
    if decays:
      crossing = jnp.where(strictly_earlier, scores[0] * d_scores, 0.0)
      crossing = crossing - products * broadcast_rows(rate, (C, C))
      store(outs.later, jnp.sum(crossing, axis=1))
      store(outs.earlier, jnp.sum(crossing, axis=0))
    lhs_e = backend.to_lhs(d_gram * broadcast_rows(-rate, (C, C)), smem.lhs_e)

    erased = d_before = None
    add = lambda sum, value: value if sum is None else sum + value
    shape = (C, TILE_WIDTH)
    v_smem = tiles.d_out  # d_out is dead when v arrives
    for block, channels in enumerate(blocks):
      if block:
        plgpu.barrier_wait(late_barrier.at[0])
      state = transpose_ref(late_state_smem if block else smem.state)
      from_out, from_y = backend.dots(Dots([(tiles.d_out, state)]), Dots([(tiles.y, state)]))
      if block == len(blocks) - 1:
        v_gmem = gmem.v.at[at.batch, at.tokens, shared_head(at.head, H, gmem.v)]
        plgpu.copy_gmem_to_smem(v_gmem, v_smem, late_barrier.at[1])
      q_smem, k_smem = tiles.q.at[:, channels], tiles.k.at[:, channels]
      erased = add(erased, jnp.sum(load_tile(erase_smem.at[:, channels]) * from_y, axis=1))
      if decays:
        d_before = add(d_before, jnp.sum(load_tile(q_smem) * from_out, axis=1))
      d_q, d_e = backend.dots(
        Dots([(lhs_q, k_smem)], start=from_out * broadcast_rows(before, shape)),
        Dots([(lhs_e, k_smem)], start=from_y * broadcast_rows(-before * rate, shape)),
      )
      d_q_smem, d_e_smem = q_smem, k_smem  # this block of q and of k is dead
      d_q_smem[...] = (d_q * scale).astype(jnp.bfloat16)
      d_e_smem[...] = (d_e * scale).astype(jnp.bfloat16)
    if decays:
      store(outs.before, d_before - rate * erased)
    plgpu.barrier_wait(late_barrier.at[1])
    d_rate = d_rate - before * erased
    store(outs.rate, d_rate + jnp.sum(load_tile(tiles.y) * load_tile(v_smem), axis=1))
    target = lambda ref: ref.at[at.batch, at.tokens, at.head]
    store_outputs([(tiles.q, target(outs.q)), (tiles.k, target(outs.erase_key))])

  keys = jax.ShapeDtypeStruct((B, T, H, K), jnp.bfloat16)
  tokens = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
  of_decays = tokens if decays else None
  smem = _buffers(arrays.tiles, 2, C, backend)
  smem = smem._replace(tiles=smem.tiles._replace(q=smem_tile(C, K)))
  return launch_per_chunk(
    body,
    arrays._replace(documents=arrays.documents.mask_only),
    QueryOutputs(keys, keys, tokens, of_decays, of_decays, of_decays),
    smem,
    sizes=(1, T // C, H, B),
    chunk=C,
    name="delta_rule_query_gradient",
    backend=backend,
  )


class KeyTiles(NamedTuple):
  """Inputs that `key_value_gradient` loads first: arrays, GMEM references or tiles."""

  q: Any  # [B, T, H, K] bfloat16
  d_out: Any  # [B, T, H, V] bfloat16: G
  x: Any  # [B, T, H, V] bfloat16
  y: Any  # [B, T, H, V] bfloat16
  k: Any  # [B, T, H, K] bfloat16, or None where nothing reads it
  erase_key: Any  # [B, T, H, K] bfloat16, or None for k
  d_erase_key: Any  # [B, T, H, K] bfloat16, to be added to dk; or None


class KeyArrays(NamedTuple):
  """Arguments of `key_value_gradient`, or their GMEM references."""

  tiles: KeyTiles
  adjoints: Any  # [B, H, N, K, V] bfloat16: A
  tables: Any  # [B, H, N, NUM_ROWS, C] float32
  documents: DocumentBoundaries


class KeyOutputs(NamedTuple):
  """Results of `key_value_gradient`."""

  k: Any  # dk [B, T, H, K] bfloat16
  v: Any  # dv [B, T, H, V] bfloat16
  after: Any  # of the tables, [B, H, T] float32, without `scale`; None without decays


@with_int32_indices
def key_value_gradient(
  arrays: KeyArrays, *, scale: float, decays: bool, chunk: int, backend: Backend
) -> KeyOutputs:
  """dk, dv and, if `decays`, the cotangent of the table's row AFTER.

  Rows are the tokens j here: scores and dP are computed transposed.
  """
  (B, T, _, K), (_, _, H, V) = arrays.tiles.q.shape, arrays.tiles.x.shape
  C, shared = chunk, arrays.tiles.erase_key is None
  blocks = [pl.ds(start, TILE_WIDTH) for start in range(0, K, TILE_WIDTH)]

  def body(at, gmem: KeyArrays, outs: KeyOutputs, smem: _Buffers):
    tiles = smem.tiles
    state_of = lambda channels: gmem.adjoints.at[at.batch, at.head, at.chunk, channels]
    _load_first(at, gmem.tiles, state_of(blocks[0]), gmem.tables, smem)
    erase_smem = tiles.k if shared else tiles.erase_key
    mask = gmem.documents.mask(at, causal_mask(C, transposed=True))
    between = decay_between_tokens(smem.tables.at[CUMULATIVE], transposed=True)
    weight = jnp.where(mask, between, 0.0)
    d_scores, d_gram = backend.dots(
      Dots([(tiles.x, transpose_ref(tiles.d_out))]), Dots([(tiles.x, transpose_ref(tiles.y))])
    )
    late_state_smem = tiles.d_out  # d_out is dead: its last product is done
    for channels in blocks[1:]:
      plgpu.copy_gmem_to_smem(state_of(channels), late_state_smem, smem.late_barrier.at[0])
    lhs_q = backend.to_lhs(d_scores * weight, smem.lhs_q)
    upper = jnp.where(causal_mask(C, strict=True, transposed=True), weight, 0.0)
    rate = load_col_vector(smem.tables.at[RATE])
    lhs_e = backend.to_lhs(d_gram * upper * broadcast_cols(-rate, (C, C)), smem.lhs_e)
    after = load_row_vector(smem.tables.at[AFTER])
    d_after: Any = None
    shape = (C, TILE_WIDTH)
    for block, channels in enumerate(blocks):
      if block:
        plgpu.barrier_wait(smem.late_barrier.at[0])
      state = transpose_ref(late_state_smem if block else smem.state)
      from_state = backend.dot(tiles.x, state)
      if decays:
        added = jnp.sum(load_tile(tiles.k.at[:, channels]) * from_state, axis=1)
        d_after = added if d_after is None else d_after + added
      q_smem = tiles.q.at[:, channels]
      pairs = [(lhs_q, q_smem), (lhs_e, erase_smem.at[:, channels])]
      (d_k,) = backend.dots(Dots(pairs, start=from_state * broadcast_rows(after, shape)))
      d_k = d_k * scale
      if tiles.d_erase_key is not None:
        d_k = d_k + load_tile(tiles.d_erase_key.at[:, channels])
      d_k_smem = q_smem  # this block of q is dead
      d_k_smem[...] = d_k.astype(jnp.bfloat16)
    if decays:
      store_unoptimized(outs.after.at[at.batch, at.head, at.tokens], d_after)
    y = load_tile(tiles.y)
    d_v = y * broadcast_rows(load_row_vector(smem.tables.at[RATE]) * scale, (C, V))
    d_v_smem = tiles.y  # y is dead: it is in registers
    d_v_smem[...] = d_v.astype(jnp.bfloat16)
    target = lambda ref: ref.at[at.batch, at.tokens, at.head]
    store_outputs([(tiles.q, target(outs.k)), (d_v_smem, target(outs.v))])

  after = jax.ShapeDtypeStruct((B, H, T), jnp.float32) if decays else None
  return launch_per_chunk(
    body,
    arrays._replace(documents=arrays.documents.mask_only),
    KeyOutputs(
      jax.ShapeDtypeStruct((B, T, H, K), jnp.bfloat16),
      jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16),
      after,
    ),
    _buffers(arrays.tiles, 1, C, backend),
    sizes=(1, T // C, H, B),
    chunk=C,
    name="delta_rule_key_value_gradient",
    backend=backend,
  )

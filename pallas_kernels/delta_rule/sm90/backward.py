"""Backward pass of the delta rule over chunks.

The kernel here is for a decay per head; `channel_gradients` has that for decays per key channel.

First `recurrence.reverse_recurrence` carries the cotangent of the state against time; then each
chunk is independent, and `gradients` computes the rest in one CTA per chunk. With S the state that
enters the chunk, A the cotangent of the one that leaves it, G that of out, x and y as in
`recurrence.py`, m = beta y, weight_ij the decay between tokens j and i:

    dP_ij = weight_ij G_i . x_j    j <= i        dL_ij = -weight_ij m_i . x_j     j < i
    dq_i  = before_i S G_i + sum_j dP_ij k_j     de_i  = -before_i S m_i + sum_j dL_ij k_j
    dk_j  = after_j A x_j + sum_i (dP_ij q_i + dL_ij e_i)      dv_i = m_i
    dbeta_i = y_i . (v_i - before_i S^T e_i) - sum_j L_ij y_i . x_j

The cumulative log decay of token i multiplies the readings of q_i and e_i, and divides what k_i
adds to the outputs of its own chunk. So its gradient needs no further product of tokens:

    q_i . dq_i + e_i . de_i - k_i . sum_l (dP_li q_l + dL_li e_l)

Pairs of which both tokens come after a decay cancel in the sum for it, because dP and dL are the
same rounded numbers in all four sums.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import decay_tables
from pallas_kernels.core.boundaries import DocumentBoundaries
from pallas_kernels.core.chunk_grid import (
  decay_between_tokens,
  launch_per_chunk,
  shared_head,
  store_outputs,
  sum_of_groups,
)
from pallas_kernels.core.wgmma import (
  TILE_WIDTH,
  WITHOUT_BARRIERS,
  Backend,
  Dots,
  broadcast_rows,
  causal_mask,
  load_col_vector,
  load_row_vector,
  load_tile,
  smem_tile,
  store_unoptimized,
  traced_once,
  transpose_ref,
  with_int32_indices,
)
from pallas_kernels.delta_rule.sm90 import channel_gradients
from pallas_kernels.delta_rule.sm90.channel_chunks import decayed_stage
from pallas_kernels.delta_rule.sm90.channel_gradients import Tiles
from pallas_kernels.delta_rule.sm90.forward import transposed
from pallas_kernels.delta_rule.sm90.recurrence import Stage, reverse_recurrence
from pallas_kernels.delta_rule.sm90.splits import leaving_cotangents
from pallas_kernels.delta_rule.types import (
  AFTER,
  BEFORE,
  CUMULATIVE,
  DECAY,
  RATE,
  Inputs,
  Options,
  rate_tables,
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
  (B, T, *_), H = inputs.q.shape, inputs.heads
  d_out, d_last = cotangents
  d_out = jnp.zeros((B, T, H, inputs.v.shape[3]), inputs.v.dtype) if d_out is None else d_out
  # `scale` multiplies the results.
  d_last = None if d_last is None else d_last / options.scale
  documents = DocumentBoundaries.of(segments)
  of_layout = _of_channels if inputs.channels else _of_heads
  d_inputs = of_layout(options, inputs, documents, kept, d_out, transposed(d_last), decays)
  names = ["q", "k", "erase_key", "write_key", "v"] + ["log_decay"] * inputs.channels
  pairs = {name: (getattr(d_inputs, name), getattr(inputs, name)) for name in names}
  summed = {n: sum_of_groups(d, x) for n, (d, x) in pairs.items() if x is not None}
  return d_inputs._replace(**summed)


def _adjoints(options: Options, inputs: Inputs, stage: Stage, kept, d_last):
  """The results of the recurrence in reverse, and the cotangent of the initial state."""
  P = options.num_splits
  reverse = functools.partial(
    reverse_recurrence,
    stage,
    heads=inputs.heads,
    num_splits=P,
    scale=options.scale,
    config=options.config.reverse,
    chunk=options.config.chunk,
    backend=options.backend,
  )
  if P == 1:
    leaving = None if d_last is None else d_last[:, :, None]
  else:
    leaving = leaving_cotangents(kept.maps, reverse(None, store=False).last_state, d_last)
  adjoints = reverse(leaving)
  d_kv = options.scale * transposed(adjoints.last_state[:, :, 0])
  return adjoints, None if inputs.kv is None else d_kv


def _of_channels(options, inputs: Inputs, documents, kept, d_out, d_last, decays) -> Inputs:
  """Gradients for decays per key channel, of all heads."""
  q, k, erase_key, v, beta, log_decay, _, write_key = inputs
  (B, T, *_), H, C = q.shape, inputs.heads, options.config.chunk
  tables = rate_tables(C, T, beta)
  stage = decayed_stage(kept.chunks, d_out, tables)
  adjoints, d_kv = _adjoints(options, inputs, stage, kept, d_last)
  d = channel_gradients.channel_gradients(
    channel_gradients.Arrays(
      Tiles(q, k, erase_key, d_out, kept.x, adjoints.corrections, write_key),
      v,
      kept.states,
      adjoints.states,
      tables,
      log_decay,
      kept.chunks.decay,
      documents,
    ),
    scale=options.scale,
    decays=decays,
    erase_before_decay=options.erase_before_decay,
    chunk=C,
    backend=options.backend,
  )
  d_beta = -d.read.sum(axis=2) if d.written is None else d.written - d.read.sum(axis=2)
  d_beta = options.scale * d_beta[:, :, : options.length]
  d_beta = d_beta.reshape(B, beta.shape[2], -1, options.length).sum(axis=2).swapaxes(1, 2)
  d_log_decay = jnp.zeros((B, T, H, k.shape[3]), jnp.float32) if not decays else d.log_decay
  d_v = adjoints.out if d.v is None else d.v
  return Inputs(d.q, d.k, d.erase_key, d_v, d_beta, d_log_decay, d_kv, d.write_key)


def _of_heads(options, inputs: Inputs, documents, kept, d_out, d_last, decays) -> Inputs:
  """Gradients for a decay per head, of all heads."""
  q, k, erase_key, v, beta, log_decay, _, _ = inputs
  (B, T, *_), C = q.shape, options.config.chunk
  stage = Stage(erase_key, kept.inverse, k, q, d_out, kept.tables, documents.segment_ids)
  adjoints, d_kv = _adjoints(options, inputs, stage, kept, d_last)
  d = gradients(
    Arrays(
      Tiles(q, k, erase_key, d_out, kept.x, adjoints.corrections),
      v,
      kept.states,
      adjoints.states,
      kept.tables,
      documents,
    ),
    scale=options.scale,
    decays=decays,
    chunk=C,
    backend=options.backend,
  )

  def of_heads(d):  # some share a rate and a decay
    d = d.reshape(B, beta.shape[2], -1, T).sum(2)[:, :, : options.length]
    return options.scale * d.swapaxes(1, 2)

  d_log_decay = jnp.zeros_like(log_decay)
  if decays:
    through_sums = decay_gradient(d.sums, kept.tables, documents, chunk=C, backend=options.backend)
    d_log_decay = jnp.where(
      log_decay > decay_tables.SMALLEST_LOG_DECAY, of_heads(through_sums), 0.0
    )
  return Inputs(d.q, d.k, d.erase_key, d.v, of_heads(d.rate), d_log_decay, d_kv)


_BY_CHUNK = [Tiles._fields.index(name) for name in ("x", "y")]


class Arrays(NamedTuple):
  """Arguments of `gradients`, or their GMEM references."""

  tiles: Tiles
  v: Any  # [B, T, H, V] bfloat16
  states: Any  # [B, H, N, V, K] bfloat16: S
  adjoints: Any  # [B, H, N, V, K] bfloat16: A
  tables: Any  # [B, H, N, NUM_ROWS, C] float32
  documents: DocumentBoundaries


class OfSums(NamedTuple):
  """Cotangents of sums of log decays, or their GMEM references; without `scale`."""

  cumulative: Any  # [B, H, T] float32: from the chunk's start to each token
  after: Any  # [B, H, T] float32: of the decay of each token in the leaving state
  decay: Any  # [B, H, N, V] float32: of that of the state over the chunk, in parts to be added up


class Gradients(NamedTuple):
  """Results of `gradients`. The last two are without `scale`."""

  q: Any  # [B, T, H, K] bfloat16
  k: Any  # [B, T, H, K] bfloat16
  erase_key: Any  # [B, T, H, K] bfloat16; None where k is the erase key: part of that of k
  v: Any  # [B, T, H, V] bfloat16
  rate: Any  # [B, H, T] float32
  sums: Any  # `OfSums`; None where decays want no gradient


class _Buffers(NamedTuple):
  tiles: Tiles
  state: Any  # [V, 64]: of some key channels, S and A in turns
  pairs: tuple  # [C, C]: dP and dL
  arrived_barrier: Any  # of tiles
  state_barrier: Any
  v_barrier: Any


@with_int32_indices
def gradients(
  arrays: Arrays, *, scale: float, decays: bool, chunk: int, backend: Backend
) -> Gradients:
  """Gradients of queries, keys, values and of the rows of the tables.

  Two CTAs share an SM and its memory, but where the erase key is not k. So what is needed late is
  loaded late, into a tile that is dead by then, and results replace arguments.
  """
  (B, T, _, K), (_, _, H, V) = arrays.tiles.k.shape, arrays.tiles.d_out.shape
  C, N, shared = chunk, T // chunk, arrays.tiles.erase_key is None
  blocks = [pl.ds(start, TILE_WIDTH) for start in range(0, K, TILE_WIDTH)]
  square, block_shape = (C, C), (C, TILE_WIDTH)
  add = lambda total, value: value if total is None else total + value

  def body(at, gmem: Arrays, outs: Gradients, smem: _Buffers):
    tiles = smem.tiles
    of_chunk = lambda ref: ref.at[at.batch, at.head, at.chunk]
    of_tokens = lambda ref: ref.at[at.batch, at.tokens, shared_head(at.head, H, ref)]
    for number, (source, target) in enumerate(zip(gmem.tiles, tiles, strict=True)):
      if source is not None:
        source = of_chunk(source) if number in _BY_CHUNK else of_tokens(source)
        plgpu.copy_gmem_to_smem(source, target, smem.arrived_barrier.at[number])

    def load_state(states, channels):
      source = of_chunk(states).at[:, channels]
      plgpu.copy_gmem_to_smem(source, smem.state, smem.state_barrier)

    load_state(gmem.states, blocks[0])
    table = gmem.tables.at[at.batch, shared_head(at.head, H, gmem.tables, axis=1), at.chunk]
    mask = gmem.documents.mask(at, causal_mask(C))
    weight = jnp.where(mask, decay_between_tokens(table.at[CUMULATIVE]), 0.0)
    before, after, rate = (load_row_vector(table.at[row]) for row in (BEFORE, AFTER, RATE))
    for number, source in enumerate(tiles):
      if source is not None:
        plgpu.barrier_wait(smem.arrived_barrier.at[number])

    erase_smem = tiles.k if shared else tiles.erase_key
    x, y = transpose_ref(tiles.x), transpose_ref(tiles.y)
    d_scores, d_gram, gram = backend.dots(
      Dots([(tiles.d_out, tiles.x)]),
      Dots([(y, tiles.x)]),
      Dots([(erase_smem, transpose_ref(tiles.k))]),
    )
    d_gram = jnp.where(causal_mask(C, strict=True), d_gram * weight, 0.0)
    d_rate = -jnp.sum(gram * d_gram, axis=1)
    scores_smem, lower_smem = smem.pairs
    scores_smem[...] = (d_scores * weight).astype(jnp.bfloat16)
    lower_smem[...] = (d_gram * broadcast_rows(-rate, square)).astype(jnp.bfloat16)
    plgpu.commit_smem()

    erased: Any = None
    cumulative: Any = None
    d_after: Any = None
    d_decay: Any = None
    row_sum = lambda keys_smem, value: jnp.sum(load_tile(keys_smem) * value, axis=1)
    for number, channels in enumerate(blocks):
      q_smem, k_smem = tiles.q.at[:, channels], tiles.k.at[:, channels]
      e_smem = erase_smem.at[:, channels]
      plgpu.barrier_wait(smem.state_barrier)
      from_out, from_y = backend.dots(Dots([(tiles.d_out, smem.state)]), Dots([(y, smem.state)]))
      state: Any = plgpu.load(smem.state, layout=plgpu.Layout.WGMMA) if decays else None
      plgpu.commit_smem()
      load_state(gmem.adjoints, channels)
      if number == len(blocks) - 1:  # d_out is dead
        plgpu.copy_gmem_to_smem(of_tokens(gmem.v), tiles.d_out, smem.v_barrier)
      erased = add(erased, row_sum(e_smem, from_y))
      d_q, d_e, d_k = backend.dots(
        Dots([(scores_smem, k_smem)], start=from_out * broadcast_rows(before, block_shape)),
        Dots([(lower_smem, k_smem)], start=from_y * broadcast_rows(-before * rate, block_shape)),
        Dots([(transpose_ref(scores_smem), q_smem), (transpose_ref(lower_smem), e_smem)]),
      )
      if decays:
        read = row_sum(q_smem, d_q) + row_sum(e_smem, d_e)
        cumulative = add(cumulative, read - row_sum(k_smem, d_k))
      plgpu.commit_smem()  # a barrier: no warp reads keys as operands any more
      q_smem[...] = (d_q * scale).astype(jnp.bfloat16)  # this block of q is dead
      if shared:
        d_k = d_k + d_e
      else:
        e_smem[...] = (d_e * scale).astype(jnp.bfloat16)  # as is this one
      plgpu.barrier_wait(smem.state_barrier)
      from_state = backend.dot(x, smem.state)
      if decays:
        products = state.astype(jnp.float32) * load_tile(smem.state)
        d_decay = add(d_decay, jnp.sum(products, axis=1))
        d_after = add(d_after, row_sum(k_smem, from_state))
      plgpu.commit_smem()
      if number + 1 < len(blocks):
        load_state(gmem.states, blocks[number + 1])
      d_k = d_k + from_state * broadcast_rows(after, block_shape)
      k_smem[...] = (d_k * scale).astype(jnp.bfloat16)  # as is this one

    store = lambda ref, value: store_unoptimized(ref.at[at.batch, at.head, at.tokens], value)
    if decays:
      store(outs.sums.cumulative, cumulative)
      store(outs.sums.after, d_after)
      store_unoptimized(of_chunk(outs.sums.decay), d_decay)
    plgpu.barrier_wait(smem.v_barrier)
    y = load_tile(y)
    v_smem = d_v_smem = tiles.d_out
    store(outs.rate, d_rate - before * erased + jnp.sum(y * load_tile(v_smem), axis=1))
    d_v_smem[...] = (y * broadcast_rows(rate * scale, (C, V))).astype(jnp.bfloat16)
    target = lambda ref: ref.at[at.batch, at.tokens, at.head]
    copies = [(tiles.q, target(outs.q)), (tiles.k, target(outs.k)), (d_v_smem, target(outs.v))]
    if not shared:
      copies.append((tiles.erase_key, target(outs.erase_key)))
    store_outputs(copies)

  keys = jax.ShapeDtypeStruct((B, T, H, K), jnp.bfloat16)
  tokens = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
  out_type = Gradients(
    q=keys,
    k=keys,
    erase_key=None if shared else keys,
    v=jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16),
    rate=tokens,
    sums=OfSums(tokens, tokens, jax.ShapeDtypeStruct((B, H, N, V), jnp.float32))
    if decays
    else None,
  )
  tiles = Tiles(
    smem_tile(C, K),
    smem_tile(C, K),
    None if shared else smem_tile(C, K),
    smem_tile(C, V),
    smem_tile(V, C),
    smem_tile(V, C),
  )
  scratch = _Buffers(
    tiles,
    state=smem_tile(V, TILE_WIDTH),
    pairs=(smem_tile(C, C), smem_tile(C, C)),
    # Those of a write key have another kernel.
    arrived_barrier=plgpu.Barrier(num_barriers=Tiles._fields.index("write_key")),
    state_barrier=plgpu.Barrier(),
    v_barrier=plgpu.Barrier(),
  )
  return launch_per_chunk(
    body,
    arrays._replace(documents=arrays.documents.mask_only),
    out_type,
    scratch,
    sizes=(1, N, H, B),
    chunk=C,
    name="delta_rule_gradients",
    backend=backend,
    compiler_params=WITHOUT_BARRIERS,
  )


@traced_once("chunk", "backend")
def decay_gradient(
  d: OfSums, tables: Any, documents: DocumentBoundaries, *, chunk: int, backend: Backend
) -> jax.Array:
  """[B, H, T]: the gradient of log decays that stay above their bound, without `scale`.

  In a kernel of its own: at the end of `gradients` its chain of sums is 0.08 of 0.42 ms.
  """
  B, H, N, V = d.decay.shape

  def load(at, gmem):
    d, tables = gmem
    row = lambda ref: load_row_vector(ref.at[at.batch, at.head, at.tokens])
    table = tables.at[at.batch, shared_head(at.head, H, tables, axis=1), at.chunk]
    later = row(d.after) * load_row_vector(table.at[AFTER])
    parts = d.decay.at[at.batch, at.head, at.chunk]
    total = [
      load_col_vector(parts.at[pl.ds(start, chunk)]) * table[DECAY, 0]
      for start in range(0, V, chunk)
    ]
    return decay_tables.OfSums(row(d.cumulative), later, total)

  return decay_tables.log_decay_gradient(
    load,
    (d, tables),
    documents,
    shape=(B, H, N * chunk),
    chunk=chunk,
    name="delta_rule_decay_gradient",
    backend=backend,
  )

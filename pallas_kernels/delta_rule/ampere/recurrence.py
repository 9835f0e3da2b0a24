"""The state along the chunks of a sequence: forward with the outputs, in reverse for its cotangent.

With S the state that enters a chunk, b = before, a = after, g = the chunk's decay, P the scores:

    x  = inverse beta (v - b e S)     out  = b q S + P x     S' = g S + (a k)^T x

and with A the cotangent of S', G that of out, the transposes of these lines:

    y  = inverse^T (a k A + P^T G)    A' = g A + (b q)^T G - (b e)^T (beta y)

With a decay per key channel q, k, e and P come decayed and b = a = 1. Where another key w than k
writes the values, which are times beta, forward, with the pairs P^w and L^w of w,

    x  = inverse beta (-L^w v - e S)     out  = q S + P x + P^w v     S' = g S + k^T x + w^T v

A CTA has 64 columns of
values of one head; its state [K, 64] stays in registers from chunk to chunk.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.chunk_grid import ChunkIndex, shared_head
from pallas_kernels.core.mma import Mma, blocks_of, copy_tile, load_tiles, store_tile
from pallas_kernels.core.wgmma import (
  COMPILER_PARAMS,
  TILE_WIDTH,
  Dots,
  broadcast_rows,
  load_row_vector,
  load_tile,
  smem_tile,
  store_unoptimized,
  transpose_ref,
  with_int32_indices,
  zero_accumulator,
)

C = TILE_WIDTH  # tokens of a chunk


class Write(NamedTuple):
  """Arrays that a write key adds, or GMEM references or SMEM of them."""

  key: Any  # [B, T, H, K] bfloat16: w; in SMEM [C, K]
  scores: Any  # [B, H, T, C] bfloat16: P^w; in SMEM [C, C]
  lower: Any  # [B, H, T, C] bfloat16: L^w; in SMEM [C, C]


class Inputs(NamedTuple):
  """Arrays, or their GMEM references. Groups of heads may share q, k, erase_key, v."""

  q: Any  # [B, T, H, K] bfloat16
  k: Any  # [B, T, H, K] bfloat16
  erase_key: Any  # [B, T, H, K] bfloat16; None for k
  v: Any  # [B, T, H, V] bfloat16: values or, in reverse, G
  inverse: Any  # [B, H, T, C] bfloat16
  scores: Any  # [B, H, T, C] bfloat16: P
  rate: Any  # [B, H, T] float32: beta
  decay: Any  # [B|1, H, N|1, K], or [B|1, H, N|1] for all K of a head, float32: g
  before: Any = None  # [B|1, H, T|C] float32: b; None for 1
  after: Any = None  # [B|1, H, T|C] float32: a; None for 1
  initial: Any = None  # [B, H, K, V] float32: the first S or, in reverse, A; None for zeros
  write: Any = None  # `Write`, forward; None for k


class Results(NamedTuple):
  """Results of the recurrence; None for those not asked for."""

  last: Any  # [B, H, K, V] float32
  out: Any = None  # [B, T, H, V] bfloat16; forward only
  states: Any = None  # [B, H, N, K, V] bfloat16: S, or A
  corrections: Any = None  # [B, T, H, V] bfloat16: x, or y


class _Buffers(NamedTuple):
  """SMEM."""

  q: Any  # [C, K]
  k: Any  # [C, K]
  erase_key: Any  # [C, K]; None for k
  v: Any  # [C, 64]
  inverse: Any  # [C, C]
  scores: Any  # [C, C]
  state: Any  # [K, 64]
  write: Any = None  # `Write`
  x: Any = None  # [C, 64], where v is read after it

  @property
  def erase(self) -> Any:
    """The erase key."""
    return self.k if self.erase_key is None else self.erase_key


@with_int32_indices
def recurrence(
  inputs: Inputs,
  *,
  heads: int,
  store: bool,
  reverse: bool = False,
  scale: float = 1.0,
  backend: Mma,
) -> Results:
  """The states of `heads` heads and, forward, the outputs times `scale`.

  `store`: whether states and corrections are results.
  """
  (B, T, _, K), V, H = inputs.k.shape, inputs.v.shape[-1], heads
  N = T // C
  array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
  tokens = array(jnp.bfloat16, B, T, H, V)
  outputs = Results(
    last=array(jnp.float32, B, H, K, V),
    out=None if reverse else tokens,
    states=array(jnp.bfloat16, B, H, N, K, V) if store else None,
    corrections=tokens if store else None,
  )

  def rows(table, at):
    return broadcast_rows(load_row_vector(at.table_row(table)), (C, C))

  def weighted(x, table, at):
    return x if table is None else x * rows(table, at)

  def decayed(state, at, decay):
    batch = at.batch if decay.shape[0] > 1 else 0
    chunk = at.chunk if decay.shape[2] > 1 else 0
    if len(decay.shape) == 3:
      return state * decay[batch, at.head, chunk]
    return state * broadcast_rows(load_row_vector(decay.at[batch, at.head, chunk]), state.shape)

  def store_corrections(outs, source_smem, at):
    if store:
      copy_tile(source_smem, outs.corrections.at[at.batch, at.tokens, at.head, at.channels])

  def product(a_smem, state_smem):
    pairs = [(a_smem.at[:, x], state_smem.at[x]) for x in blocks_of(K)]
    return backend.dots(Dots(pairs))[0]

  def forward(at, state, gmem: Inputs, outs: Results, smem: _Buffers):
    x_smem, write = smem.v if smem.x is None else smem.x, smem.write
    old = weighted(product(smem.erase, smem.state), gmem.before, at)
    if write is None:
      right = load_tile(smem.v) - old
    else:
      right = -backend.dot(write.lower, smem.v, start=old)
    x_smem[...] = (right * rows(gmem.rate, at)).astype(jnp.bfloat16)
    x = backend.dot(smem.inverse, x_smem)
    x_smem[...] = x.astype(jnp.bfloat16)
    store_corrections(outs, x_smem, at)
    out = weighted(product(smem.q, smem.state), gmem.before, at)
    out = backend.dot(smem.scores, x_smem, start=out)
    if gmem.after is not None:
      x_smem[...] = weighted(x, gmem.after, at).astype(jnp.bfloat16)
    state = backend.dot(transpose_ref(smem.k), x_smem, start=decayed(state, at, gmem.decay))
    if write is not None:
      out = backend.dot(write.scores, smem.v, start=out)
      state = backend.dot(transpose_ref(write.key), smem.v, start=state)
    target = outs.out.at[at.batch, at.tokens, at.head, at.channels]
    store_tile(target, out * scale, smem.scores)
    return state

  def backward(at, adjoint, gmem: Inputs, outs: Results, smem: _Buffers):
    right = weighted(product(smem.k, smem.state), gmem.after, at)
    right = backend.dot(transpose_ref(smem.scores), smem.v, start=right)
    if gmem.before is not None:
      smem.v[...] = weighted(load_tile(smem.v), gmem.before, at).astype(jnp.bfloat16)
    adjoint = decayed(adjoint, at, gmem.decay)
    adjoint = backend.dot(transpose_ref(smem.q), smem.v, start=adjoint)
    smem.scores[...] = right.astype(jnp.bfloat16)  # scores are dead
    y = backend.dot(transpose_ref(smem.inverse), smem.scores)
    smem.v[...] = y.astype(jnp.bfloat16)
    store_corrections(outs, smem.v, at)
    y = weighted(y, gmem.before, at) * -rows(gmem.rate, at)
    smem.scores[...] = y.astype(jnp.bfloat16)
    return backend.dot(transpose_ref(smem.erase), smem.scores, start=adjoint)

  def step(at, state, gmem: Inputs, outs: Results, smem: _Buffers):
    everything = slice(None)
    part = lambda x, columns: x.at[at.batch, at.tokens, shared_head(at.head, H, x), columns]
    pairs = lambda x: x.at[at.batch, at.head, at.tokens]
    copies = [(part(gmem.k, everything), smem.k), (part(gmem.v, at.channels), smem.v)]
    copies += [(part(gmem.q, everything), smem.q), (pairs(gmem.inverse), smem.inverse)]
    copies += [(pairs(gmem.scores), smem.scores)]
    if gmem.erase_key is not None:
      copies.append((part(gmem.erase_key, everything), smem.erase_key))
    if gmem.write is not None:
      copies.append((part(gmem.write.key, everything), smem.write.key))
      copies += [(pairs(x), y) for x, y in zip(gmem.write[1:], smem.write[1:], strict=True)]
    load_tiles(*copies)
    smem.state[...] = state.astype(jnp.bfloat16)
    if store:
      target = outs.states.at[at.batch, at.head, at.chunk, everything, at.channels]
      copy_tile(smem.state, target)
    return (backward if reverse else forward)(at, state, gmem, outs, smem)

  def body(gmem: Inputs, outs: Results, smem: _Buffers):
    batch, head, block = (lax.axis_index(x) for x in ("row", "head", "block"))
    columns = pl.ds(block * TILE_WIDTH, TILE_WIDTH)
    state = zero_accumulator(K, TILE_WIDTH)
    if gmem.initial is not None:
      entering = gmem.initial.at[batch, head, :, columns]
      state = plgpu.load(entering, layout=plgpu.Layout.WGMMA, optimized=False)

    def chunk(number, state):
      at = ChunkIndex(batch, head, N - 1 - number if reverse else number, block, C)
      return step(at, state, gmem, outs, smem)

    state = lax.fori_loop(0, N, chunk, state)
    store_unoptimized(outs.last.at[batch, head, :, columns], state)

  keys, tile = smem_tile(C, K), smem_tile(C, TILE_WIDTH)
  buffers = _Buffers(keys, keys, keys, tile, tile, tile, smem_tile(K, TILE_WIDTH))
  if inputs.erase_key is None:
    buffers = buffers._replace(erase_key=None)
  if inputs.write is not None:
    buffers = buffers._replace(write=Write(keys, tile, tile), x=tile)
  (results,) = plgpu.kernel(
    body,
    out_type=[outputs],
    scratch_types=[buffers],
    grid=(V // TILE_WIDTH, H, B),
    grid_names=("block", "head", "row"),
    interpret=backend.interpret,
    kernel_name=f"delta_rule_ampere_{'reverse' if reverse else 'forward'}",
    compiler_params=COMPILER_PARAMS,
  )(inputs)
  return results

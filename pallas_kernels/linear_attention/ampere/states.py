"""The recurrent state along the chunks of a sequence, forward and in reverse.

    S_{n+1} = diag(decay_n) S_n + sum over the tokens j of chunk n of  a_j (w_j b_j)^T

Forward a are keys, b values; in reverse a are queries and b the cotangents of the outputs. A CTA
has 64 columns of b, of one head, of one split of a sequence; its state [K, 64] stays in registers
from chunk to chunk.
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


class StateInputs(NamedTuple):
  """Arrays of `states`, or their GMEM references. Groups of heads may share a, b, q."""

  a: Any  # [B, T, H, K] bfloat16
  b: Any  # [B, T, H, V] bfloat16
  weight: Any  # [B|1, H, T|C] float32: w; None for 1
  decay: Any  # [B|1, H, N|1, K], or [B|1, H, N|1] for all K of a head, float32
  initial: Any  # [B, H, P, K, V] float32, of each split; None for zeros
  # For outputs; else None.
  q: Any = None  # [B, T, H, K] bfloat16
  scores: Any = None  # [B, H, T, C] bfloat16
  before: Any = None  # [B|1, H, T|C] float32: the weight of the state in the outputs; None for 1
  denominator: Any = None  # [B, H, T] float32: what divides the outputs; None for 1


class StateOutputs(NamedTuple):
  """Results of `states`, or their GMEM references; None for those not asked for."""

  last: Any  # [B, H, P, K, V] float32: the state after each split
  states: Any = None  # [B, H, N, K, V] bfloat16, that enter the chunks
  out: Any = None  # [B, T, H, V] bfloat16


class _Buffers(NamedTuple):
  """SMEM."""

  a: Any  # [C, K]
  b: Any  # [C, 64]
  q: Any  # [C, K]
  scores: Any  # [C, C]
  state: Any  # [K, 64]


@with_int32_indices
def states(
  inputs: StateInputs,
  *,
  heads: int,
  num_splits: int,
  store_states: bool,
  reverse: bool = False,
  scale: float = 1.0,
  backend: Mma,
) -> StateOutputs:
  """The states, and with `inputs.q` the outputs, times `scale`, of `heads` heads."""
  (B, T, _, K), V, H, P = inputs.a.shape, inputs.b.shape[-1], heads, num_splits
  N, has_out = T // C, inputs.q is not None
  array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
  outputs = StateOutputs(
    last=array(jnp.float32, B, H, P, K, V),
    states=array(jnp.bfloat16, B, H, N, K, V) if store_states else None,
    out=array(jnp.bfloat16, B, T, H, V) if has_out else None,
  )

  def decayed(state, at, gmem):
    decay, shape = gmem.decay, (K, TILE_WIDTH)
    batch = at.batch if decay.shape[0] > 1 else 0
    chunk = at.chunk if decay.shape[2] > 1 else 0
    if len(decay.shape) == 3:
      return state * decay[batch, at.head, chunk]
    return state * broadcast_rows(load_row_vector(decay.at[batch, at.head, chunk]), shape)

  def step(at, state, gmem: StateInputs, outs: StateOutputs, smem: _Buffers):
    part = lambda x, columns: x.at[at.batch, at.tokens, shared_head(at.head, H, x), columns]
    everything = slice(None)
    copies = [(part(gmem.a, everything), smem.a), (part(gmem.b, at.channels), smem.b)]
    if has_out:
      scores = gmem.scores.at[at.batch, at.head, at.tokens]
      copies += [(part(gmem.q, everything), smem.q), (scores, smem.scores)]
    load_tiles(*copies)
    if smem.state is not None:
      smem.state[...] = state.astype(jnp.bfloat16)
    if store_states:
      copy_tile(smem.state, outs.states.at[at.batch, at.head, at.chunk, everything, at.channels])
    out = None
    if has_out:
      out = outputs_of(at, gmem, smem)
    if gmem.weight is not None:
      rows = load_row_vector(at.table_row(gmem.weight))
      smem.b[...] = (load_tile(smem.b) * broadcast_rows(rows, (C, C))).astype(jnp.bfloat16)
    state = backend.dot(transpose_ref(smem.a), smem.b, start=decayed(state, at, gmem))
    if out is not None:
      store_tile(outs.out.at[at.batch, at.tokens, at.head, at.channels], out, smem.scores)
    return state

  def outputs_of(at, gmem, smem):
    entering = [(smem.q.at[:, x], smem.state.at[x]) for x in blocks_of(K)]
    if gmem.before is None:
      out = backend.dots(Dots([(smem.scores, smem.b), *entering]))[0]
    else:
      rows = load_row_vector(at.table_row(gmem.before))
      out = backend.dots(Dots(entering))[0] * broadcast_rows(rows, (C, C))
      out = backend.dot(smem.scores, smem.b, start=out)
    if gmem.denominator is not None:
      rows = load_row_vector(gmem.denominator.at[at.batch, at.head, at.tokens])
      out = out / broadcast_rows(rows, (C, C))
    return out * scale if scale != 1.0 else out

  def body(gmem: StateInputs, outs: StateOutputs, smem: _Buffers):
    batch, head, split, block = (lax.axis_index(x) for x in ("row", "head", "split", "block"))
    per_split = N // P
    columns = pl.ds(block * TILE_WIDTH, TILE_WIDTH)
    if gmem.initial is None:
      state = zero_accumulator(K, TILE_WIDTH)
    else:
      entering = gmem.initial.at[batch, head, split, :, columns]
      state = plgpu.load(entering, layout=plgpu.Layout.WGMMA, optimized=False)

    def chunk(number, state):
      number = per_split - 1 - number if reverse else number
      at = ChunkIndex(batch, head, split * per_split + number, block, C)
      return step(at, state, gmem, outs, smem)

    state = lax.fori_loop(0, per_split, chunk, state)
    store_unoptimized(outs.last.at[batch, head, split, :, columns], state)

  has_state = store_states or has_out
  buffers = _Buffers(
    smem_tile(C, K),
    smem_tile(C, TILE_WIDTH),
    smem_tile(C, K) if has_out else None,
    smem_tile(C, C) if has_out else None,
    smem_tile(K, TILE_WIDTH) if has_state else None,
  )
  (results,) = plgpu.kernel(
    body,
    out_type=[outputs],
    scratch_types=[buffers],
    grid=(V // TILE_WIDTH, P, H, B),
    grid_names=("block", "split", "head", "row"),
    interpret=backend.interpret,
    kernel_name="linear_attention_ampere_" + ("outputs" if has_out else "states"),
    compiler_params=COMPILER_PARAMS,
  )(inputs)
  return results

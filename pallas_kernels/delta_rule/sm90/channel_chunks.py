"""Chunks with a decay per key channel: all that the recurrence needs, in one CTA per chunk.

The decays inside a chunk are those of `linear_attention.sm90.intra_chunk`. Queries and the erase
key are decayed from the chunk's start and keys to its end, once. With d_ij the decays between
tokens j and i, per channel,

    P_ij = q_i . d_ij k_j    j <= i        L_ij = e_i . d_ij k_j    j < i

and the recurrence gets P and the inverse of I + diag(beta) L.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries, select_rows
from pallas_kernels.core.chunk_grid import launch_per_chunk, shared_head, start_copies
from pallas_kernels.core.wgmma import (
  COMPILER_PARAMS,
  TILE_WIDTH,
  Backend,
  broadcast_rows,
  fill_ones_column,
  load_row_vector,
  load_scaled,
  smem_tile,
  with_int32_indices,
)
from pallas_kernels.delta_rule.sm90.recurrence import Stage
from pallas_kernels.delta_rule.sm90.triangular_inverse import diagonal_blocks, triangular_inverse
from pallas_kernels.linear_attention.sm90.intra_chunk import (
  AFTER,
  BEFORE,
  DecayScratch,
  ScoresOfChunk,
  TokenDecayFactors,
)


class ChunkInputs(NamedTuple):
  """Arrays, or their GMEM references. Groups of heads may share one."""

  q: Any  # [B, T, H, K] bfloat16, T a multiple of the chunk
  k: Any  # [B, T, H, K] bfloat16
  erase_key: Any  # [B, T, H, K] bfloat16, or None for k
  log_decay: Any  # [B, T, H, K] float32
  tables: Any  # [B, H, N, 1, C] float32: beta
  documents: DocumentBoundaries

  @property
  def bonus(self) -> None:
    """None: queries see the key of their own token as any other."""
    return


class DecayedChunks(NamedTuple):
  """Results of `decayed_chunks`, or their GMEM references; 0 where documents forbid."""

  q: Any  # [B, T, H, K] bfloat16, decayed from the chunk's start
  k: Any  # [B, T, H, K] bfloat16, decayed to the chunk's end
  erase_key: Any  # [B, T, H, K] bfloat16, decayed from the chunk's start
  scores: Any  # [B, H, T, C] bfloat16: P
  inverse: Any  # [B, H, T, C] bfloat16
  decay: Any  # [B, H, N, K] float32, of the state over the chunk, whatever the documents


class _Buffers(NamedTuple):
  q: Any  # [C, K]
  k: Any  # [C, K]
  erase_key: Any  # [C, K], or None
  right: Any  # [C, K]: the right operand of products
  lhs: Any  # of `Backend.to_lhs`
  scores: Any  # [C, C]
  ones: Any  # [C, 64]
  decay: DecayScratch
  blocks: Any  # of `triangular_inverse`
  more: list  # [C, C]: of the six that it needs those that are not dead tiles
  cols: Any  # [K] float32
  arrived_barrier: Any  # of q, k, the erase key


@with_int32_indices
def decayed_chunks(
  inputs: ChunkInputs, *, heads: int, chunk: int, backend: Backend
) -> DecayedChunks:
  """The chunks of `heads` heads."""
  (B, T, _, K), C, H = inputs.k.shape, chunk, heads
  shared = inputs.erase_key is None
  bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  keys, pairs = bf16(B, T, H, K), bf16(B, H, T, C)
  decay = jax.ShapeDtypeStruct((B, H, T // C, K), jnp.float32)
  blocks = [pl.ds(start, TILE_WIDTH) for start in range(0, K, TILE_WIDTH)]
  scratch = _Buffers(
    q=smem_tile(C, K),
    k=smem_tile(C, K),
    erase_key=None if shared else smem_tile(C, K),
    right=smem_tile(C, K),
    lhs=backend.lhs_scratch(2, C, K),
    scores=smem_tile(C, C),
    ones=smem_tile(C, TILE_WIDTH),
    decay=DecayScratch.of(inputs.log_decay, C, K),
    blocks=diagonal_blocks(),
    more=[smem_tile(C, C) for _ in range(4 - 2 * len(blocks))],
    cols=plgpu.SMEM((K,), jnp.float32),
    arrived_barrier=plgpu.Barrier(num_barriers=3),
  )

  def body(at, gmem: ChunkInputs, outs: DecayedChunks, smem: _Buffers):
    of_tokens = lambda ref: ref.at[at.batch, at.tokens, shared_head(at.head, H, ref)]
    loaded = [(gmem.q, smem.q), (gmem.k, smem.k)]
    loaded += [] if shared else [(gmem.erase_key, smem.erase_key)]
    for number, (source, target) in enumerate(loaded):
      plgpu.copy_gmem_to_smem(of_tokens(source), target, smem.arrived_barrier.at[number])
    log_decay = of_tokens(gmem.log_decay)
    factors = [
      TokenDecayFactors(log_decay.at[:, x], smem.decay.channels(x), False, backend) for x in blocks
    ]
    fill_ones_column(smem.ones)
    for number in range(len(loaded)):
      plgpu.barrier_wait(smem.arrived_barrier.at[number])
    erase_smem = smem.k if shared else smem.erase_key
    queries = [smem.q, erase_smem]
    scores, lower = ScoresOfChunk(at, factors, blocks, gmem, smem, queries, backend).scores()
    rate = gmem.tables.at[at.batch, shared_head(at.head, H, gmem.tables, axis=1), at.chunk, 0]
    lower = gmem.documents.mask_scores(at, lower * broadcast_rows(load_row_vector(rate), (C, C)))
    smem.scores[...] = gmem.documents.mask_scores(at, scores).astype(jnp.bfloat16)

    # Each replaces a dead tile; the erase key, where it is k itself, the right operand.
    decayed_erase_smem = smem.right if shared else smem.erase_key
    sees = gmem.documents.sees_entering_state(at)
    reaches = gmem.documents.reaches_leaving_state(at)
    for channels, f in zip(blocks, factors, strict=True):
      part = lambda tile, channels=channels: tile.at[:, channels]
      scaled = lambda tile, factor, rows: select_rows(
        rows, load_scaled(tile, factor), jnp.bfloat16(0.0)
      )
      before = f.factor(f.signs(BEFORE))
      part(decayed_erase_smem)[...] = scaled(part(erase_smem), before, sees)
      part(smem.q)[...] = scaled(part(smem.q), before, sees)
      part(smem.k)[...] = scaled(part(smem.k), f.factor(f.signs(AFTER)), reaches)
      both = smem.decay.channels(channels)
      smem.cols.at[channels][...] = jnp.exp2(backend.sum_rows([both.high, both.low], smem.ones))
    of_result = lambda ref: ref.at[at.batch, at.tokens, at.head]
    of_pairs = lambda ref: ref.at[at.batch, at.head, at.tokens]
    start_copies(
      [
        (smem.scores, of_pairs(outs.scores)),
        (smem.q, of_result(outs.q)),
        (smem.k, of_result(outs.k)),
        (decayed_erase_smem, of_result(outs.erase_key)),
        (smem.cols, outs.decay.at[at.batch, at.head, at.chunk]),
      ]
    )

    # Decays are dead. The result goes to a whole tile, where copies begin.
    free = [x.at[:, channels] for x in (smem.decay.high, smem.decay.low) for channels in blocks]
    free = [*free, *smem.more, smem.ones, smem.decay.signs]
    inverse_smem = smem.decay.signs
    inverse_smem[...] = triangular_inverse(lower, smem.blocks, free, backend).astype(jnp.bfloat16)
    start_copies([(inverse_smem, of_pairs(outs.inverse))])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  return launch_per_chunk(
    body,
    inputs,
    DecayedChunks(q=keys, k=keys, erase_key=keys, scores=pairs, inverse=pairs, decay=decay),
    scratch,
    sizes=(1, T // C, H, B),
    chunk=C,
    name="delta_rule_decayed_chunks",
    backend=backend,
    compiler_params=COMPILER_PARAMS,
  )


def decayed_stage(chunks: DecayedChunks, v: jax.Array, tables: jax.Array) -> Stage:
  """The inputs of the recurrence, of decayed chunks; `v`: values or, in reverse, G."""
  return Stage(
    chunks.erase_key,
    chunks.inverse,
    chunks.k,
    chunks.q,
    v,
    tables,
    segment_ids=None,
    pairs=chunks.scores,
    decay=chunks.decay,
  )

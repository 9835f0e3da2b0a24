"""Chunks with a decay per key channel: all that the recurrence needs, in one CTA per chunk.

The decays inside a chunk are those of `linear_attention.sm90.intra_chunk`. Queries and the erase
key are decayed from the chunk's start and keys to its end, once. With d_ij the decays between
tokens j and i, per channel,

    P_ij = q_i . d_ij k_j    j <= i        L_ij = e_i . d_ij k_j    j < i

and the recurrence gets P and the inverse of I + diag(beta) L. A write key is decayed as k is; with
it in place of k in P and L, the recurrence gets P, too, and -diag(beta) L.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries
from pallas_kernels.core.chunk_grid import launch_per_chunk, shared_head, start_copies
from pallas_kernels.core.wgmma import (
  COMPILER_PARAMS,
  TILE_WIDTH,
  Backend,
  Ref,
  broadcast_rows,
  fill_ones_column,
  load_row_vector,
  load_scaled,
  load_tile,
  smem_tile,
  with_int32_indices,
  zero_accumulator,
)
from pallas_kernels.delta_rule.sm90.recurrence import Stage
from pallas_kernels.delta_rule.triangular_inverse import (
  InverseTiles,
  diagonal_blocks,
  lhs_scratch,
  triangular_inverse,
)
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
  write_key: Any = None  # [B, T, H, K] bfloat16, or None for k

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
  decay: Any  # [B, H, N, K] float32, of the state over the chunk
  # Of a write key, or None.
  write_key: Any = None  # [B, T, H, K] bfloat16, decayed to the chunk's end
  write_scores: Any = None  # [B, H, T, C] bfloat16
  write_lower: Any = None  # [B, H, T, C] bfloat16


class ScoreTiles(NamedTuple):
  """Tiles that `ScoresOfChunk` reads, of one key."""

  q: Any  # [C, K]
  k: Any  # [C, K]
  right: Any  # [C, K]
  lhs: Any
  decay: DecayScratch


class _Buffers(NamedTuple):
  q: Any  # [C, K]
  keys: Any  # [1 or 2, C, K]: k, after the write key if there is one
  erase_key: Any  # [C, K], or None
  right: Any  # [C, K]: the right operand of products
  lhs: Any  # of `Backend.to_lhs`
  scores: Any  # [1 or 2, C, C]: of each key
  ones: Any  # [C, 64]; then the inverse
  decay: Any  # `DecayScratch`; when it is dead, `InverseTiles`
  blocks: Any  # of `triangular_inverse`
  lhs_of_inverse: Any  # the same
  write_lower: Any  # [C, C], or None
  cols: Any  # [K] float32
  arrived_barrier: Any  # of q, k, the erase key, the write key


def undo_own_decay(erase_smem: Ref, factors: TokenDecayFactors) -> None:
  """Divides the erase key by the decay of its own token, at least e^-21: it reads before it."""
  erase_smem[...] = (load_tile(erase_smem) * jnp.exp2(-factors.log2_decay)).astype(jnp.bfloat16)


@with_int32_indices
def decayed_chunks(
  inputs: ChunkInputs, *, heads: int, erase_before_decay: bool, chunk: int, backend: Backend
) -> DecayedChunks:
  """The chunks of `heads` heads. `erase_before_decay`: the erase key is not k itself."""
  (B, T, _, K), C, H = inputs.k.shape, chunk, heads
  shared, writes = inputs.erase_key is None, inputs.write_key is not None
  bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  keys, pairs = bf16(B, T, H, K), bf16(B, H, T, C)
  decay = jax.ShapeDtypeStruct((B, H, T // C, K), jnp.float32)
  blocks = [pl.ds(start, TILE_WIDTH) for start in range(0, K, TILE_WIDTH)]
  scratch = _Buffers(
    q=smem_tile(C, K),
    keys=smem_tile(1 + writes, C, K),
    erase_key=None if shared else smem_tile(C, K),
    right=smem_tile(C, K),
    lhs=backend.lhs_scratch(2, C, K),
    scores=smem_tile(1 + writes, C, C),
    ones=smem_tile(C, TILE_WIDTH),
    decay=plgpu.RefUnion(DecayScratch.of(inputs.log_decay, C, K), InverseTiles.of()),
    blocks=diagonal_blocks(),
    lhs_of_inverse=lhs_scratch(backend),
    write_lower=smem_tile(C, C) if writes else None,
    cols=plgpu.SMEM((K,), jnp.float32),
    arrived_barrier=plgpu.Barrier(num_barriers=4),
  )

  def body(at, gmem: ChunkInputs, outs: DecayedChunks, smem: _Buffers):
    of_tokens = lambda ref: ref.at[at.batch, at.tokens, shared_head(at.head, H, ref)]
    keys_smem = [smem.keys.at[n] for n in range(1 + writes)]
    k_smem, write_key_smem, scores_smem = keys_smem[-1], keys_smem[0], smem.scores.at[int(writes)]
    loaded = [(gmem.q, smem.q), (gmem.k, k_smem)]
    loaded += [] if shared else [(gmem.erase_key, smem.erase_key)]
    loaded += [(gmem.write_key, write_key_smem)] if writes else []
    for number, (source, target) in enumerate(loaded):
      plgpu.copy_gmem_to_smem(of_tokens(source), target, smem.arrived_barrier.at[number])
    decay, inverse_tiles = smem.decay
    log_decay = of_tokens(gmem.log_decay)
    factors = [
      TokenDecayFactors(log_decay.at[:, x], decay.channels(x), False, backend) for x in blocks
    ]
    fill_ones_column(smem.ones)
    documents, states = gmem.documents, gmem.documents.load_states(at)
    for number in range(len(loaded)):
      plgpu.barrier_wait(smem.arrived_barrier.at[number])
    erase_smem = k_smem if shared else smem.erase_key
    if erase_before_decay:
      for channels, f in zip(blocks, factors, strict=True):
        undo_own_decay(erase_smem.at[:, channels], f)
    queries = [smem.q, erase_smem]
    rate = gmem.tables.at[at.batch, shared_head(at.head, H, gmem.tables, axis=1), at.chunk, 0]
    of_pairs = lambda ref: ref.at[at.batch, at.head, at.tokens]

    def pairs_of(number, _):
      tiles = ScoreTiles(smem.q, smem.keys.at[number], smem.right, smem.lhs, decay)
      chunk = ScoresOfChunk(at, factors, blocks, gmem, states, tiles, queries, backend)
      scores, lower = chunk.scores()
      lower = lower * broadcast_rows(load_row_vector(rate), (C, C))
      scores, lower = documents.mask_scores(at, (scores, lower), states)
      smem.scores.at[number][...] = scores.astype(jnp.bfloat16)
      if writes:

        @pl.when(number == 0)
        def _():
          smem.write_lower[...] = (-lower).astype(jnp.bfloat16)

      plgpu.commit_smem()  # all warps have read the key's tiles
      return lower

    # A loop, because the code of both would not fit an SM's cache of instructions.
    zeros = zero_accumulator(C, C)
    lower = lax.fori_loop(0, 2, pairs_of, zeros) if writes else pairs_of(0, zeros)
    if writes:
      copies = (smem.scores.at[0], outs.write_scores), (smem.write_lower, outs.write_lower)
      start_copies([(source, of_pairs(target)) for source, target in copies])

    # Each replaces a dead tile; the erase key, where it is k itself, the right operand.
    decayed_erase_smem = smem.right if shared else smem.erase_key
    for channels, f in zip(blocks, factors, strict=True):
      part = lambda tile, channels=channels: tile.at[:, channels]

      def scale(targets, tiles, factor, select, part=part):
        scaled = [load_scaled(part(tile), factor) for tile in tiles]
        for target, x in zip(targets, select(at, states, scaled), strict=True):
          part(target)[...] = x

      before, targets = f.factor(f.signs(BEFORE)), [decayed_erase_smem, smem.q]
      scale(targets, [erase_smem, smem.q], before, documents.select_seeing)
      after = f.factor(f.signs(AFTER))
      scale(keys_smem, keys_smem, after, documents.select_reaching)
      both = decay.channels(channels)
      total = jnp.exp2(backend.sum_rows([both.high, both.low], smem.ones))
      smem.cols.at[channels][...] = total if states is None else states.keeps_state(total)
    of_result = lambda ref: ref.at[at.batch, at.tokens, at.head]
    start_copies(
      [
        *([(write_key_smem, of_result(outs.write_key))] if writes else []),
        (scores_smem, of_pairs(outs.scores)),
        (smem.q, of_result(outs.q)),
        (k_smem, of_result(outs.k)),
        (decayed_erase_smem, of_result(outs.erase_key)),
        (smem.cols, outs.decay.at[at.batch, at.head, at.chunk]),
      ]
    )

    inverse = triangular_inverse(lower, smem.blocks, inverse_tiles, smem.lhs_of_inverse, backend)
    smem.ones[...] = inverse.astype(jnp.bfloat16)
    start_copies([(smem.ones, of_pairs(outs.inverse))])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  return launch_per_chunk(
    body,
    inputs,
    DecayedChunks(
      q=keys,
      k=keys,
      erase_key=keys,
      scores=pairs,
      inverse=pairs,
      decay=decay,
      write_key=keys if writes else None,
      write_scores=pairs if writes else None,
      write_lower=pairs if writes else None,
    ),
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
    write_key=chunks.write_key,
    write_scores=chunks.write_scores,
    write_lower=chunks.write_lower,
  )

"""Scores inside each chunk: one CTA per chunk, 64 key channels after the other.

    scores_ij = sum_k q_ik k_jk exp(sum of the log decays of channel k over the tokens between)

For decays per key channel it also returns the queries decayed from the chunk's start and the keys
decayed to its end, which is all that the other kernels need to know of the decays.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries, select_rows
from pallas_kernels.core.chunk_grid import (
  decay_between_tokens,
  launch_per_chunk,
  own_token,
  shared_head,
  with_own_weight,
)
from pallas_kernels.core.mma import Mma, blocks_of, load_tiles, store_tile
from pallas_kernels.core.wgmma import (
  TILE_WIDTH,
  broadcast_cols,
  broadcast_rows,
  causal_mask,
  load_col_vector,
  load_tile,
  smem_tile,
  store_unoptimized,
  transpose_ref,
  with_int32_indices,
  zero_accumulator,
)
from pallas_kernels.linear_attention.ampere.decays import (
  AFTER,
  BEFORE,
  LARGEST_LOG2,
  MERGES,
  ConstantDecay,
  DecayBuffers,
  TokenDecay,
  decay_of_block,
  meet_at_start,
  merged_pairs,
  subchunk_pairs,
)

C = TILE_WIDTH  # tokens of a chunk


class ScoreInputs(NamedTuple):
  """Arrays of `chunk_scores`, or their GMEM references. Groups of heads may share one."""

  q: Any  # [B, T, H, K] bfloat16
  k: Any  # [B, T, H, K] bfloat16
  log_decay: Any  # [H, K] or [B, T, H, K] float32; None with `cumulative`
  cumulative: Any  # [B|1, H, T|C] float32 of `ScalarDecayTables`, or None
  bonus: Any  # [H, K] float32 or None
  documents: DocumentBoundaries
  own_weight: Any = None  # [B, H, T] float32, with `cumulative`: of a token in its own output


class ScoreOutputs(NamedTuple):
  """Results of `chunk_scores`, or their GMEM references; q, k and total of channel decays only."""

  scores: Any  # [B, H, T, C] bfloat16; float32 of erase keys
  score_sum: Any  # [B, H, T] float32: the sum of each row of scores, if asked for
  q: Any  # [B, T, H, K] bfloat16, decayed from the chunk's start
  k: Any  # [B, T, H, K] bfloat16, decayed to the chunk's end; None with erase keys
  log2_total: Any  # [B, H, N, K] float32: log2 of the decay over the chunk; decays per token


class _Buffers(NamedTuple):
  """SMEM, each [C, 64]."""

  q: Any
  k: Any
  left: Any  # operands of products
  right: Any
  vector: Any  # [C] float32
  decay: DecayBuffers


@with_int32_indices
def chunk_scores(
  inputs: ScoreInputs,
  *,
  heads: int,
  length: int,
  sums: bool = False,
  erase_keys: bool = False,
  rank: int = 1,
  backend: Mma,
) -> ScoreOutputs:
  """Scores of all chunks, of `heads` heads and `length` tokens before padding.

  `erase_keys`: queries are the delta rule's erase keys, which read all tokens but their own.
  `rank`: rows of a token, with scalar decays.
  """
  (B, T, _, K), H, log_decay = inputs.q.shape, heads, inputs.log_decay
  scalar, read_first = log_decay is None, inputs.bonus is not None
  array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
  f32, bf16 = jnp.float32, jnp.bfloat16
  decayed = None if scalar else array(bf16, B, T, H, K)
  per_token = not scalar and log_decay.ndim == 4
  outputs = ScoreOutputs(
    scores=array(f32 if erase_keys else bf16, B, H, T, C),
    score_sum=array(f32, B, H, T) if sums else None,
    q=decayed,
    k=None if erase_keys else decayed,
    log2_total=array(f32, B, H, T // C, K) if per_token and not erase_keys else None,
  )

  def channel_block(at, channels, scores, gmem, outs, smem):
    decay = decay_of_block(
      gmem.log_decay,
      at,
      channels,
      smem.decay,
      heads=H,
      length=length,
      read_first=read_first,
      backend=backend,
    )
    queries, keys = (lambda: load_tile(smem.q)), (lambda: load_tile(smem.k))
    if not erase_keys:
      left_smem = smem.q
      if read_first:
        weight = load_col_vector(gmem.bonus.at[at.head, channels])
        left_smem = backend.to_lhs(queries() * broadcast_cols(weight, (C, C)), smem.left)
      same = backend.dot(left_smem, transpose_ref(smem.k))
      scores = scores + jnp.where(own_token((C, C)), same, 0.0)

    def product(left_factor, right_factor):
      left_smem = backend.to_lhs(queries() * left_factor, smem.left)
      right_smem = backend.to_lhs(keys() * right_factor, smem.right)
      return backend.dot(left_smem, transpose_ref(right_smem))

    if isinstance(decay, ConstantDecay):
      level = decay.level(smem.vector)
      factors, inside = decay.in_subchunk(level), subchunk_pairs(level)
      merges, among = (level, MERGES), lambda pairs: pairs
    else:
      before, keys_log2 = decay.from_start()
      meet, all_meet = meet_at_start(before, LARGEST_LOG2, at, gmem.documents, smem.vector)
      open_rows = jnp.where(meet, jnp.float32(0.0), 1.0)
      still_open = lambda: broadcast_rows(open_rows, (C, C)) > 0
      factors = jnp.exp2(before), jnp.exp2(jnp.minimum(-keys_log2, LARGEST_LOG2))
      inside = causal_mask(C, strict=True) & ~still_open()
      merges, among = (0, jnp.where(all_meet, 0, MERGES)), lambda pairs: pairs & still_open()
    scores = jnp.where(inside, scores + product(*factors), scores)

    def merge(level, scores):
      size = 1 << level
      factor = decay.factor(size)
      pairs = product(factor, factor)
      return jnp.where(among(merged_pairs(size)), scores + pairs, scores)

    scores = lax.fori_loop(*merges, merge, scores)
    before = factors[0] if isinstance(decay, TokenDecay) else decay.factor(BEFORE)

    def store_decayed(target, value, rows):
      target = target.at[at.batch, at.tokens, at.head, channels]
      store_tile(target, select_rows(rows, value), smem.left)

    store_decayed(outs.q, queries() * before, gmem.documents.sees_entering_state(at))
    if erase_keys:
      return scores
    reaches = gmem.documents.reaches_leaving_state(at)
    store_decayed(outs.k, keys() * decay.factor(AFTER), reaches)
    if isinstance(decay, TokenDecay):
      target = outs.log2_total.at[at.batch, at.head, at.chunk, channels]
      store_unoptimized(target, jnp.sum(decay.log2, axis=0))
    return scores

  def body(at, gmem: ScoreInputs, outs: ScoreOutputs, smem: _Buffers):
    scores = zero_accumulator(C, C)
    for channels in blocks_of(K):
      part = lambda x, channels=channels: x.at[
        at.batch, at.tokens, shared_head(at.head, H, x), channels
      ]
      load_tiles((part(gmem.q), smem.q), (part(gmem.k), smem.k))
      if scalar:
        scores = backend.dot(smem.q, transpose_ref(smem.k), start=scores)
      else:
        scores = channel_block(at, channels, scores, gmem, outs, smem)
    if scalar:
      mask = gmem.documents.mask(at, causal_mask(C, strict=erase_keys, rank=rank))
      between = decay_between_tokens(at.table_row(gmem.cumulative))
      if gmem.own_weight is not None:
        own = gmem.own_weight.at[at.batch, at.head, at.tokens]
        between = with_own_weight(between, own, rank)
      scores = jnp.where(mask, scores * between, 0.0)
    else:
      scores = gmem.documents.mask_scores(at, scores)
    if sums:
      target = outs.score_sum.at[at.batch, at.head, at.tokens]
      store_unoptimized(target, jnp.sum(scores, axis=1))
    target = outs.scores.at[at.batch, at.head, at.tokens]
    if erase_keys:
      store_unoptimized(target, scores)
    else:
      store_tile(target, scores, smem.q)

  tile = smem_tile(C, TILE_WIDTH)
  extra = None if scalar else tile
  buffers = DecayBuffers(None, None, None) if scalar else DecayBuffers.of(log_decay)
  return launch_per_chunk(
    body,
    inputs,
    outputs,
    _Buffers(tile, tile, extra, extra, None if scalar else plgpu.SMEM((C,), f32), buffers),
    sizes=(1, T // C, H, B),
    chunk=C,
    name="linear_attention_ampere_scores",
    backend=backend,
  )

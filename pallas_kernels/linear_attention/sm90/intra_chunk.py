"""Scores inside each chunk, and decays inside a chunk, for decays per key channel.

    scores_ij = sum_k q_ik k_jk exp(sum of the log decays of channel k over the tokens between)

`chunk_scores` computes them for all chunks at once, one CTA for each or for a few. Decays per token
are read here only: so it also returns the queries decayed from the chunk's start and the keys
decayed to its end.

Decays are computed without a difference of cumulative sums. A pair of tokens i > j is weighted by
the decays of the tokens between them: a factor of query i times a factor of key j, exponentials of
sums up to the place where the two meet.

* Inside a subchunk they meet at its middle, where one factor may grow: up to exp(63), which
  bfloat16 and float32 hold. Subchunks have 8, 16, 32 or 64 tokens, 8 << level, the most for which
  all channels stay below that: with log decays above -2 per token the whole chunk is one subchunk.
  Log decays below -21 per token are taken as -21, so that subchunks of 8 always do.
* Subchunks are merged in pairs, level by level, and tokens of two halves meet at the boundary
  between them: sums of terms of one sign, factors of at most 1.

The decay classes hold the factors of 64 channels (`ConstantDecayFactors` with a decay that is the
same at every token, `TokenDecayFactors` with one per token):

* `level`: the level of the subchunks, 0 to `LEVELS`;
* `in_subchunk(reuse)`: the factors of queries and keys for the pairs `subchunk_pairs(level)`;
* `signs(which, reuse)`: the tokens that an `Exponent` sums over, or, for a number, the exponent at
  the boundary between merged halves of so many tokens;
* `factor(signs)`: the decay, 2 to that exponent;
* `accumulate_decay_grad(acc, x, d_x, which, ...)`: adds the contribution of one decay factor to the
  gradient of the log decays: x times d_x, the cotangent of x through that factor, summed over the
  tokens of its exponent. With constant decays without the factor x, the same at all tokens: their
  gradient is the sum over tokens of x times that.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries, StateDocuments
from pallas_kernels.core.chunk_grid import shared_head
from pallas_kernels.core.index import ChunkIndex
from pallas_kernels.core.wgmma import (
  COMPILER_PARAMS,
  ROW_LAYOUT,
  TILE_WIDTH,
  Backend,
  Dots,
  Ref,
  broadcast_cols,
  broadcast_rows,
  fill_ones_column,
  iota,
  load_col_vector,
  load_scaled,
  load_tile,
  smem_tile,
  transpose_ref,
  with_int32_indices,
  zero_accumulator,
)
from pallas_kernels.linear_attention.config import ScoresConfig

SMALLEST_LOG_DECAY = -21.0
LEVELS = 3  # subchunks of 8 become 16, 32 and 64
LARGEST_LOG2 = 92.0  # of a factor: exp(63.8)
_LOG2_E = 1.4426950408889634
_SMALLEST, _LOG2_SMALLEST = 8, 3  # tokens of a subchunk


class Exponent(enum.Enum):
  """A sum of log decays that is an exponent of each token."""

  BEFORE = enum.auto()  # from the chunk's start to the token
  AFTER = enum.auto()  # from the token to the chunk's end
  QUERY = enum.auto()  # from the middle of the subchunk to the query
  KEY = enum.auto()  # from the key to the middle of the subchunk


BEFORE, AFTER, QUERY, KEY = Exponent


def tokens_at(level):
  """Tokens of a subchunk of this level, and of each half that is merged there."""
  return _SMALLEST << level


def subchunk_level(log_decay: jax.Array) -> jax.Array:
  """[...] int32, 0 to 3: the level of subchunks for constant decays of the last axis together."""
  return _level_of_rate(-jnp.min(log_decay, axis=-1))


def _level_of_rate(rate):
  return _level(jnp.minimum(rate, -SMALLEST_LOG_DECAY) * _LOG2_E, LARGEST_LOG2)


def _max_of_channels(x, scratch_smem):
  """The largest of 64 numbers, in all threads. `scratch_smem`: 128 numbers."""
  for half in (0, TILE_WIDTH):  # the maximum of all wants a number for each thread
    scratch_smem.at[pl.ds(half, TILE_WIDTH)][...] = x
  plgpu.commit_smem()
  layout = plgpu.Layout.WG_STRIDED((2 * TILE_WIDTH,), vec_size=1)
  return jnp.max(plgpu.load(scratch_smem, layout=layout))


def _level(fastest, limit):
  """int32: the level up to which no factor exceeds 2^limit. `fastest`: log2, per token."""
  # The largest factor: of the second query of a subchunk, or of the last key but one.
  sizes = [tokens_at(level + 1) for level in range(LEVELS)]
  one, none = jnp.int32(1), jnp.int32(0)
  fits: Any = sum(jnp.where(fastest * (size // 2 - 1) <= limit, one, none) for size in sizes)
  return fits


def _positions(chunk, transposed):
  """Rows and columns of [C, C], or columns and rows, and the subchunks of 8 that they are in.

  The number of the subchunk costs the compiler little, for it knows the layout.
  """
  shape = (chunk, chunk)
  i, j = iota(shape, int(transposed)), iota(shape, 1 - int(transposed))
  return i, j, i >> _LOG2_SMALLEST, j >> _LOG2_SMALLEST


def subchunk_pairs(chunk: int, level, *, transposed: bool = False) -> jax.Array:
  """[C, C] bool: the pairs i > j inside a subchunk. Rows are i, columns j, unless `transposed`."""
  i, j, i_subchunk, j_subchunk = _positions(chunk, transposed)
  later = (i & (_SMALLEST - 1)) > (j & (_SMALLEST - 1))
  later = (i_subchunk > j_subchunk) | ((i_subchunk == j_subchunk) & later)
  return ((i_subchunk ^ j_subchunk) < (1 << level)) & later


def merged_pairs(chunk: int, size, *, transposed: bool = False) -> jax.Array:
  """[C, C] bool: the pairs i > j that meet where halves of `size` are merged."""
  _, _, i_subchunk, j_subchunk = _positions(chunk, transposed)
  apart, half = i_subchunk ^ j_subchunk, size >> _LOG2_SMALLEST
  return (apart >= half) & (apart < 2 * half) & (i_subchunk > j_subchunk)


def token_numbers(chunk: int) -> jax.Array:
  """[C] int32: the numbers of a chunk's tokens, as a row vector."""
  return plgpu.broadcasted_iota(jnp.int32, (chunk,), 0, layout=ROW_LAYOUT)


class Signs(NamedTuple):
  """The tokens that an exponent sums over.

  Per-token decays: `smem` [C, C] says, with -1, 0 and 1, which tokens (columns) the exponent of
  each row sums over. There is one such tile, valid until the next is written; `reuse` in a method's
  arguments is what the tile has, where the caller knows: it is not written again.
  """

  which: Any  # an `Exponent`, or the size of merged halves
  smem: Ref | None = None
  negative: bool = False


class ConstantDecayFactors:
  """Decay factors for one decay per key channel, the same at every token: sums are counts.

  Each factor is an exponential for each token and channel, computed when it is asked for. Products
  of earlier factors would save exponentials, but the registers that keep them cost more.
  """

  def __init__(self, log_decay_gmem: Ref, level, read_first: bool, valid, chunk: int):
    """
    Args:
      log_decay_gmem: [K] float32: of 64 channels, or of all for `factor` alone.
      level: `subchunk_level` of these channels, or less.
      read_first: whether queries see the state before the decay of their own token.
      valid: tokens of this chunk before padding.
      chunk: tokens of a chunk.
    """
    self._log2 = jnp.maximum(load_col_vector(log_decay_gmem), SMALLEST_LOG_DECAY) * _LOG2_E
    self._read_first, self._valid = int(read_first), valid
    self._shape = chunk, log_decay_gmem.shape[0]
    self.level = level

  def signs(self, which, reuse: Signs | None = None) -> Signs:
    """The tokens that the exponent `which` sums over."""
    del reuse
    return Signs(which)

  def factor(self, signs: Signs) -> jax.Array:
    """[C, 64]: the decay over these tokens."""
    return self._powers(self._count(signs.which))

  def in_subchunk(self, reuse: Signs | None = None) -> tuple[jax.Array, jax.Array, Signs | None]:
    """The factors [C, 64] of queries and of keys for pairs inside a subchunk, and None.

    But 1 for the first query and the last key of a subchunk, which meet nothing: they would be the
    largest, and infinite times a large key.
    """
    del reuse
    last = tokens_at(self.level) - 1
    place = self._tokens() & last
    queries, keys = self._count(QUERY), self._count(KEY)
    queries, keys = jnp.where(place > 0, queries, 0), jnp.where(place < last, keys, 0)
    return self._powers(queries), self._powers(keys), None

  def choose_level(self, limit: float) -> None:
    """Does nothing: the level has been chosen for all channels that a product has."""
    del limit

  def lags(self) -> jax.Array:
    """[C, C] float32: how many tokens decay between query i and key j, of pairs i > j."""
    shape = (self._shape[0],) * 2
    lags = iota(shape, 0) - iota(shape, 1) - self._read_first
    return lags.astype(jnp.float32)

  def accumulate_decay_grad(self, acc, x, d_x, which, staging_smem, reuse: Signs | None = None):
    """`acc` [C, 64] (None for zero) plus the contribution of the factor of `which`."""
    del x, staging_smem, reuse
    added = broadcast_rows(self._count(which).astype(jnp.float32), self._shape) * d_x
    return added if acc is None else acc + added

  def _powers(self, counts):
    shape = self._shape
    counts = broadcast_rows(counts.astype(jnp.float32), shape)
    return jnp.exp2(counts * broadcast_cols(self._log2, shape))

  def _count(self, which):
    """[C]: how many tokens the sum of `which` has for each row; negative: to be divided by."""
    i = self._tokens()
    if which is BEFORE:
      return i + (1 - self._read_first)
    if which is AFTER:
      return jnp.maximum(self._valid - 1 - i, 0)
    if which is QUERY or which is KEY:
      size = tokens_at(self.level)
      position, middle = i & (size - 1), (size >> 1) - 1
      return position - (middle + self._read_first) if which is QUERY else middle - position
    position = i & (which - 1)
    second = (i & which) != 0
    return jnp.where(second, position + (1 - self._read_first), which - 1 - position)

  def _tokens(self):
    return token_numbers(self._shape[0])


class DecayScratch(NamedTuple):
  """SMEM of `decay_factors`; all None for constant decays."""

  high: Any  # the leading bfloat16 digits of log2 decays
  low: Any  # ... and the rest
  signs: Any  # [C, C] of `Signs`
  largest: Any  # float32, for a maximum over channels

  @classmethod
  def of(cls, log_decay, chunk: int, width: int = TILE_WIDTH) -> "DecayScratch":
    """For decays [H, K] or [B, T, H, K] of `width` channels."""
    if log_decay.ndim == 2:
      return cls(None, None, None, None)
    largest = plgpu.SMEM((2 * chunk,), jnp.float32)
    return cls(smem_tile(chunk, width), smem_tile(chunk, width), smem_tile(chunk, chunk), largest)

  def channels(self, channels) -> "DecayScratch":
    """The part for a block of channels."""
    if self.high is None:
      return self
    return self._replace(high=self.high.at[:, channels], low=self.low.at[:, channels])


class TokenDecayFactors:
  """Decay factors for one decay per token and key channel.

  Sums over tokens are products with the matrix of `Signs` on the tensor cores. A log
  decay is split into two bfloat16 numbers, which hold it to 2^-17 of itself; since the terms of a
  sum have one sign, so is the sum.
  """

  def __init__(
    self, log_decay_gmem: Ref, scratch_smem: DecayScratch, read_first: bool, backend: Backend
  ):
    """
    Args:
      log_decay_gmem: [C, 64] float32.
      scratch_smem: `high` and `low` for these channels alone; objects may share `signs`.
      read_first: whether queries see the state before the decay of their own token.
    """
    log_decay = plgpu.load(log_decay_gmem, layout=plgpu.Layout.WGMMA, optimized=False)
    self.log2_decay = jnp.maximum(log_decay, SMALLEST_LOG_DECAY) * _LOG2_E
    rounded = self.log2_decay.astype(jnp.bfloat16)
    scratch_smem.high[...] = rounded
    scratch_smem.low[...] = (self.log2_decay - rounded.astype(jnp.float32)).astype(jnp.bfloat16)
    self._scratch_smem, self._read_first, self._backend = scratch_smem, bool(read_first), backend
    self.level: Any = 0

  def signs(
    self,
    which,
    reuse: Signs | None = None,
    masked: Callable[[jax.Array], jax.Array] = lambda signs: signs,
  ) -> Signs:
    """The tokens that the exponent `which` sums over, of those that `masked` leaves."""
    # Queries that see their own token's decay meet keys at a point of time: of opposite signs.
    negative = which is KEY and not self._read_first
    which = QUERY if negative else which
    smem = self._scratch_smem.signs
    if reuse is None or reuse.which is not which:
      signs = masked(_signs(smem.shape[0], which, self.level, self._read_first))
      smem[...] = signs.astype(jnp.bfloat16)
      plgpu.commit_smem()
    return Signs(which, smem, negative)

  def _sum(self, signs):
    pairs = [(signs.smem, x) for x in (self._scratch_smem.high, self._scratch_smem.low)]
    return self._backend.dots(Dots(pairs))[0]

  def factor(self, signs: Signs) -> jax.Array:
    """[C, 64]: the decay over these tokens."""
    return jnp.exp2(self._sum(signs))

  def choose_level(self, limit: float) -> None:
    """Sets `level` by the fastest decay. `limit`: log2 of how far a factor may grow."""
    fastest = jnp.max(-self.log2_decay, axis=1)
    largest = _max_of_channels(fastest, self._scratch_smem.largest)
    self.level = _level(largest, limit)

  def from_start(self, before: Signs) -> tuple[jax.Array, jax.Array]:
    """[C, 64]: log2 of the decay from the chunk's start to each query, and to each key."""
    queries = self._sum(before)
    return queries, queries + self.log2_decay if self._read_first else queries

  def in_subchunk(self, reuse: Signs | None = None) -> tuple[jax.Array, jax.Array, Signs]:
    """The factors [C, 64] of queries and of keys for pairs inside a subchunk, and signs to reuse.

    But at most 2^92, as no pair needs more: those of the first query and of the last key of a
    subchunk, which meet nothing, would be the largest, and infinite times a large key.
    """
    signs = self.signs(QUERY, reuse)
    queries = self._sum(signs)
    if self._read_first:
      signs = self.signs(KEY)
      keys = self._sum(signs)
    else:
      keys = -queries
    queries, keys = (jnp.exp2(jnp.minimum(x, LARGEST_LOG2)) for x in (queries, keys))
    return queries, keys, signs

  def accumulate_decay_grad(self, acc, x, d_x, which, staging_smem, reuse: Signs | None = None):
    """`acc` [C, 64] (None for zero) plus the contribution of the factor of `which`.

    `x` is a function; `staging_smem` a tile [C, 64] to be overwritten.
    """
    return self.add_log_gradient(acc, x() * d_x, self.signs(which, reuse), staging_smem)

  def add_log_gradient(self, acc, d_log, signs: Signs, staging_smem) -> jax.Array:
    """`acc` [C, 64] plus the gradient of log decays from that of the exponents of `signs`."""
    d_log = -d_log if signs.negative else d_log
    staging_smem[...] = d_log.astype(jnp.bfloat16)
    plgpu.commit_smem()
    return self._backend.dot(transpose_ref(signs.smem), staging_smem, start=acc)


def _signs(chunk, which, level, read_first):
  """[C, C], -1, 0 or 1: how often token t (column) counts in the sum of row i."""
  i, t, i_subchunk, t_subchunk = _positions(chunk, False)
  same = i_subchunk == t_subchunk
  i_place, t_place = i & (_SMALLEST - 1), t & (_SMALLEST - 1)
  own_token = which is KEY or not read_first
  up_to = (t_place <= i_place) if own_token else (t_place < i_place)
  one, none = jnp.float32(1.0), jnp.float32(0.0)
  up_to = (t_subchunk < i_subchunk) | (same & up_to)
  if which is QUERY or which is KEY:
    last = tokens_at(level) - 1
    late = (t & last) > (last >> 1)
    plus, minus = (one, -one) if which is QUERY else (-one, one)
    in_subchunk = jnp.where(late & up_to, plus, jnp.where(late | up_to, none, minus))
    return jnp.where((i_subchunk ^ t_subchunk) < (1 << level), in_subchunk, none)
  if which is BEFORE:
    return jnp.where(up_to, one, none)
  later = (t_subchunk > i_subchunk) | (same & (t_place > i_place))
  if which is AFTER:
    return jnp.where(later, one, none)
  half = which >> _LOG2_SMALLEST
  in_second = (i_subchunk & half) != 0
  counts = (in_second & up_to) | (~in_second & later)
  return jnp.where(counts & ((i_subchunk ^ t_subchunk) < half), one, none)


def decay_factors(
  log_decay_gmem: Ref,  # [H, K] or [B, T, H, K]
  level,  # of subchunks, for constant decays
  scratch_smem: DecayScratch,
  at: ChunkIndex,
  channels,  # a slice
  *,
  heads: int,  # of the grid; groups may share one of a decay per token
  length: int,  # tokens before padding
  read_first: bool,
  backend: Backend,
) -> ConstantDecayFactors | TokenDecayFactors:
  """The decay factors of `channels` in a chunk."""
  if len(log_decay_gmem.shape) == 4:
    head = shared_head(at.head, heads, log_decay_gmem)
    log_decay_gmem = log_decay_gmem.at[at.batch, at.tokens, head, channels]
    return TokenDecayFactors(log_decay_gmem, scratch_smem, read_first, backend)
  valid = jnp.minimum(length - at.chunk * at.size, at.size)
  log_decay_gmem = log_decay_gmem.at[at.head, channels]
  return ConstantDecayFactors(log_decay_gmem, level, read_first, valid, at.size)


class ScoreInputs(NamedTuple):
  """Arrays of `chunk_scores`, or their GMEM references. Groups of heads may share one."""

  q: Any  # [B, T, H, K] bfloat16, T a multiple of the chunk
  k: Any  # [B, T, H, K] bfloat16
  log_decay: Any  # [H, K] or [B, T, H, K] float32
  bonus: Any  # [H, K] float32 or None
  documents: DocumentBoundaries


class ScoreOutputs(NamedTuple):
  """Results of `chunk_scores`, or their GMEM references."""

  scores: Any  # [B, H, T, C] bfloat16
  q: Any  # [B, T, H, K] bfloat16, decayed from the chunk's start; None unless asked for
  k: Any  # [B, T, H, K] bfloat16, decayed to the chunk's end; None unless asked for
  score_sum: Any  # [B, H, T] float32, the sum of each row of scores; None unless asked for
  decay: Any  # [B, H, N, K] float32, of the state over each chunk; None for constant decays


class _ScoreBuffers(NamedTuple):
  """SMEM of `chunk_scores`."""

  q: Any  # [slots, C, K]: a CTA with several chunks loads the next one while it works on one
  k: Any  # [slots, C, K]
  right: Any  # [C, K]: the right operand of products
  scores: Any  # [C, C]
  lhs: Any  # of `Backend.to_lhs`
  ones: Any  # [C, 64], per-token decays
  decay: DecayScratch
  rows: Any  # [C] float32
  cols: Any  # [K] float32
  largest: Any  # [2 C] float32
  arrived_barrier: Any


@with_int32_indices
def chunk_scores(
  inputs: ScoreInputs,
  *,
  heads: int,  # H of the results
  length: int,  # tokens before padding
  decayed_q: bool = True,
  decayed_k: bool = True,
  sums: bool = False,
  config: ScoresConfig,
  chunk: int,
  backend: Backend,
) -> ScoreOutputs:
  """Scores of all chunks; `decayed_q`, `decayed_k`, `sums`: which further results to compute."""
  q, log_decay = inputs.q, inputs.log_decay
  (B, T, _, K), H = q.shape, heads
  C, N = chunk, T // chunk
  per_token = log_decay.ndim == 4
  f32, bf16 = jnp.float32, jnp.bfloat16
  decayed = jax.ShapeDtypeStruct((B, T, H, K), bf16)
  out_type = ScoreOutputs(
    scores=jax.ShapeDtypeStruct((B, H, T, C), bf16),
    q=decayed if decayed_q else None,
    k=decayed if decayed_k else None,
    score_sum=jax.ShapeDtypeStruct((B, H, T), f32) if sums else None,
    decay=jax.ShapeDtypeStruct((B, H, N, K), f32) if per_token else None,
  )
  per_cta = config.chunks_per_cta
  slots = min(2, per_cta)
  scratch = _ScoreBuffers(
    q=smem_tile(slots, C, K),
    k=smem_tile(slots, C, K),
    right=smem_tile(C, K),
    scores=smem_tile(C, C),
    lhs=backend.lhs_scratch(1, C, K),
    ones=smem_tile(C, TILE_WIDTH) if per_token else None,
    decay=DecayScratch.of(log_decay, C, K),
    rows=plgpu.SMEM((C,), f32),
    cols=plgpu.SMEM((K,), f32),
    largest=None if per_token else plgpu.SMEM((2 * TILE_WIDTH,), f32),
    arrived_barrier=plgpu.Barrier(num_barriers=2 * slots),
  )
  blocks = [pl.ds(start, TILE_WIDTH) for start in range(0, K, TILE_WIDTH)]

  def body(gmem: ScoreInputs, outs: ScoreOutputs, smem: _ScoreBuffers):
    batch, head, start = (lax.axis_index(name) for name in ("row", "head", "chunk"))
    start = start * per_cta
    count = jnp.minimum(per_cta, N - start)

    def copies_of(index):
      tokens, slot = pl.ds((start + index) * C, C), lax.rem(index, slots)
      for number, (source, target) in enumerate(((gmem.q, smem.q), (gmem.k, smem.k))):
        barrier = smem.arrived_barrier.at[2 * slot + number]
        yield source.at[batch, tokens, shared_head(head, H, source)], target.at[slot], barrier

    def fetch(index):
      for source, target, barrier in copies_of(index):
        plgpu.copy_gmem_to_smem(source, target, barrier)

    def step(index, carry):
      # Copies of the chunk before must be through before their sources are written again.
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      if slots > 1:
        pl.when(index + 1 < count)(lambda: fetch(index + 1))
      at = ChunkIndex(batch, head, start + index, 0, C)
      slot = lax.rem(index, slots)
      here = smem._replace(q=smem.q.at[slot], k=smem.k.at[slot])
      wait = lambda: [plgpu.barrier_wait(barrier) for _, _, barrier in copies_of(index)]
      factors = [
        decay_factors(
          gmem.log_decay,
          level,
          smem.decay.channels(channels),
          at,
          channels,
          heads=H,
          length=length,
          read_first=inputs.bonus is not None,
          backend=backend,
        )
        for channels in blocks
      ]
      states = gmem.documents.load_states(at)
      wait()
      scores = ScoresOfChunk(at, factors, blocks, gmem, states, here, [here.q], backend)
      _store_scores(scores, outs)
      return carry

    fetch(0)
    level = None
    if per_token:
      fill_ones_column(smem.ones)
    else:
      rates = [-load_col_vector(gmem.log_decay.at[head, channels]) for channels in blocks]
      fastest = _max_of_channels(functools.reduce(jnp.maximum, rates), smem.largest)
      level = _level_of_rate(fastest)
    if per_cta == 1:
      step(0, None)
    else:
      lax.fori_loop(0, count, step, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  (results,) = plgpu.kernel(
    body,
    out_type=[out_type],  # a tuple would be several results
    scratch_types=[scratch],
    grid=(-(-N // per_cta), H, B),
    grid_names=("chunk", "head", "row"),
    interpret=backend.interpret,
    kernel_name="linear_attention_scores",
    compiler_params=COMPILER_PARAMS,
  )(inputs)
  return results


class ScoresOfChunk:
  """The scores of one chunk. Of factors and blocks there is one entry per block of channels.

  There may be several tiles of queries, with the same decays. The first meet the key of their own
  token too, and the others earlier keys alone.
  """

  def __init__(
    self,
    at: ChunkIndex,
    factors: Sequence[Any],
    blocks: Sequence[Any],
    gmem: Any,  # has `documents`, and `bonus` for constant decays
    states: StateDocuments | None,
    smem: Any,  # has q, k, which have arrived, right, lhs and decay, as `_ScoreBuffers`
    queries: Sequence[Ref],  # [C, K]
    backend: Backend,
  ):
    self.at, self.factors, self.blocks, self.backend = at, factors, blocks, backend
    self.gmem, self.smem, self.shape = gmem, smem, (at.size, at.size)
    self.states = states
    self.queries, self.per_token = queries, isinstance(factors[0], TokenDecayFactors)

  def scores(self) -> tuple[jax.Array, ...]:
    """[C, C] of each tile of queries, of pairs within the chunk, whatever their documents."""
    same_token = iota(self.shape, 0) == iota(self.shape, 1)
    own = _same_token_scores(self.gmem, self.smem, self.at, self.backend)
    own = jnp.where(same_token, own, 0.0)
    scores = (own, *(zero_accumulator(*self.shape) for _ in self.queries[1:]))
    if not self.per_token:
      scores = self.in_subchunks(scores, True)
      level = self.factors[0].level
      return lax.fori_loop(level, LEVELS, lambda i, x: self.merge(x, True, i), scores)
    scores, closed_rows, all_closed = self.from_chunk_start(scores)
    still_open = lambda: broadcast_rows(closed_rows, self.shape) == 0
    any_open = jnp.where(all_closed, 0, 1)  # a loop of 0 or 1: see README.md about `lax.cond`
    scores = lax.fori_loop(0, any_open, lambda _, x: self.in_subchunks(x, still_open()), scores)
    merges = jnp.where(all_closed, 0, LEVELS)
    return lax.fori_loop(0, merges, lambda i, x: self.merge(x, still_open(), i), scores)

  def product(self, factor_pairs) -> Sequence[jax.Array]:
    """[C, C]: queries times keys, each times its factor, from a function per block."""
    smem, sums = self.smem, [[] for _ in self.queries]
    for channels, factor_pair in zip(self.blocks, factor_pairs, strict=True):
      left, right = factor_pair()
      right_smem = smem.right.at[:, channels]
      right_smem[...] = load_scaled(smem.k.at[:, channels], right)
      for number, (queries, pairs) in enumerate(zip(self.queries, sums, strict=True)):
        scaled = load_scaled(queries.at[:, channels], left)
        scaled = self.backend.to_lhs(scaled, smem.lhs, number, slice(None), channels)
        pairs.append((scaled, transpose_ref(right_smem)))
    plgpu.commit_smem()
    return self.backend.dots(*(Dots(pairs) for pairs in sums))

  def in_subchunks(self, scores, open_rows) -> tuple[jax.Array, ...]:
    """`scores` with those of pairs inside a subchunk, in rows that are open."""
    factors = self.factors
    # The blocks of channels share the signs, unless queries and keys take turns in the tile.
    signs = None if self.gmem.bonus is not None else factors[0].signs(QUERY)
    pairs = self.product([lambda f=f: f.in_subchunk(signs)[:2] for f in factors])
    return _selected(subchunk_pairs(self.at.size, factors[0].level) & open_rows, pairs, scores)

  def merge(self, scores, open_rows, level) -> tuple[jax.Array, ...]:
    """`scores` with those of pairs that meet where subchunks are merged, in rows that are open."""
    size = tokens_at(level)
    signs = self.factors[0].signs(size)
    pairs = self.product([lambda f=f: (f.factor(signs),) * 2 for f in self.factors])
    return _selected(merged_pairs(self.at.size, size) & open_rows, pairs, scores)

  def from_chunk_start(self, scores):
    """Scores of the rows whose decay from the start of the chunk or of their document in it fits.

    There the keys' factors grow, up to 2^92; beyond, pairs are left to subchunks and merges. A row
    is chosen by the sum over its own document: so its scores depend, to the last bit, on nothing
    that follows and on no other document, not even in how they are computed.

    Returns:
      scores, [C] float32, 1 for such rows, and whether all are.
    """
    at, documents, states = self.at, self.gmem.documents, self.states
    masked = lambda signs: documents.mask_scores(at, signs, states)
    before = self.factors[0].signs(BEFORE, masked=masked)
    sums = [f.from_start(before) for f in self.factors]
    lowest = functools.reduce(jnp.minimum, [jnp.min(queries, axis=1) for queries, _ in sums])
    lowest_smem = self.smem.decay.largest.at[pl.ds(0, at.size)]
    lowest_smem[...] = lowest
    plgpu.commit_smem()
    lowest_of_all = lowest_smem[at.size - 1]  # of one document: sums only fall
    if states is not None:
      several = jnp.where(states.cut, 1, 0)
      of_all = lambda *_: -_max_of_channels(-lowest, self.smem.decay.largest)
      lowest_of_all = lax.fori_loop(0, several, of_all, lowest_of_all)
    all_closed = lowest_of_all >= -LARGEST_LOG2
    closed = jnp.where(lowest >= -LARGEST_LOG2, jnp.float32(1.0), jnp.float32(0.0))
    grown = lambda keys: jnp.exp2(jnp.minimum(-keys, LARGEST_LOG2))
    pairs = self.product([lambda x=x: (jnp.exp2(x[0]), grown(x[1])) for x in sums])
    earlier = iota(self.shape, 0) > iota(self.shape, 1)
    rows = broadcast_rows(closed, self.shape) > 0
    return _selected(earlier & rows, pairs, scores), closed, all_closed


def _selected(mask, scores, others):
  return tuple(jnp.where(mask, x, y) for x, y in zip(scores, others, strict=True))


def _store_scores(chunk: ScoresOfChunk, outs: ScoreOutputs) -> None:
  """Computes and stores the results that are wanted, those of `outs` that are not None."""
  smem, at, documents, states = chunk.smem, chunk.at, chunk.gmem.documents, chunk.states
  (scores,) = chunk.scores()
  for channels, f in zip(chunk.blocks, chunk.factors, strict=True):
    for x_smem, which, select, wanted in (
      (smem.q, BEFORE, documents.select_seeing, outs.q),
      (smem.k, AFTER, documents.select_reaching, outs.k),
    ):
      if wanted is not None:
        x = load_scaled(x_smem.at[:, channels], f.factor(f.signs(which)))
        x_smem.at[:, channels][...] = select(at, states, x)
  plgpu.commit_smem()
  if chunk.per_token:
    for channels in chunk.blocks:
      both = smem.decay.channels(channels)
      total = chunk.backend.sum_rows([both.high, both.low], smem.ones)
      decay = jnp.exp2(total)
      smem.cols.at[channels][...] = decay if states is None else states.keeps_state(decay)

  scores = documents.mask_scores(at, scores, states)
  smem.scores[...] = scores.astype(jnp.bfloat16)
  b, h, n = at.batch, at.head, at.chunk
  copies = [(smem.scores, outs.scores.at[b, h, at.tokens])]
  if outs.q is not None:
    copies.append((smem.q, outs.q.at[b, at.tokens, h]))
  if outs.k is not None:
    copies.append((smem.k, outs.k.at[b, at.tokens, h]))
  if outs.score_sum is not None:
    smem.rows[...] = jnp.sum(scores, axis=1)
    copies.append((smem.rows, outs.score_sum.at[b, h, at.tokens]))
  if chunk.per_token:
    copies.append((smem.cols, outs.decay.at[b, h, n]))
  plgpu.commit_smem()
  for source, target in copies:
    plgpu.copy_smem_to_gmem(source, target)


def _same_token_scores(gmem: ScoreInputs, smem: _ScoreBuffers, at, backend: Backend):
  """[C, C], right on the diagonal: q_i k_i, weighted by the bonus if there is one."""
  if gmem.bonus is None:
    return backend.dot(smem.q, transpose_ref(smem.k))
  pairs = []
  for start in range(0, smem.q.shape[-1], TILE_WIDTH):
    channels = pl.ds(start, TILE_WIDTH)
    queries = load_tile(smem.q.at[:, channels])
    weights = load_col_vector(gmem.bonus.at[at.head, channels])
    left = queries * broadcast_cols(weights, queries.shape)
    left = backend.to_lhs(left, smem.lhs, 0, slice(None), channels)
    pairs.append((left, transpose_ref(smem.k.at[:, channels])))
  return backend.dots(Dots(pairs))[0]

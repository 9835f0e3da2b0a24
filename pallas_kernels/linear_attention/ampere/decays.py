"""Decays inside a chunk, per key channel, and the pairs of tokens that they weight.

A pair of tokens i > j is weighted by the decays of the tokens between them. Blocks of 1, 2, 4, ...
32 tokens are merged two by two; each pair meets at exactly one merge, j in its first half and i in
its second, and

    sum over j < t <= i of g_t  =  (sum from the second half's start to i) + (sum after j to the
                                    first half's end)

Both sums have terms of one sign, so no difference of sums is formed, both factors are at most 1,
and a score depends on nothing but the tokens between its own. So for each merge every token has one
exponent, of the query if it is in a second half and of the key if it is in a first half. `BEFORE`
and `AFTER` are the sums from the chunk's start and to its end, for the entering and leaving state.

One product serves all pairs of a subchunk instead where factors may grow without overflow. Constant
decays have subchunks of 8, 16, 32 or 64 tokens, the largest that the fastest channel allows, or
none. Pairs meet in the middle of theirs (`level`, `in_subchunk`), and merges begin at that size.
With decays per token the whole chunk is one, or there is none, and pairs meet at its start: the
factor of the query is the decay from there to i, that of the key its inverse to j, which grows
(`from_start`, `meet_at_start`).

With a bonus queries read the state before the decay of their own token: sums then end before i.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.chunk_grid import shared_head
from pallas_kernels.core.index import ChunkIndex
from pallas_kernels.core.mma import Mma
from pallas_kernels.core.wgmma import (
  ROW_LAYOUT,
  TILE_WIDTH,
  Dots,
  Ref,
  broadcast_cols,
  broadcast_rows,
  iota,
  load_col_vector,
  load_tile,
  smem_tile,
  transpose_ref,
)

SMALLEST_LOG_DECAY = -80.0  # exp(-80) = 2e-35: float32 sums do not notice anything smaller
MERGES = 6  # of 1, 2, 4, ... 32 tokens, to a chunk of 64
BEFORE, AFTER = "before", "after"
SUBCHUNKS = (3, 4, 5, 6)  # log2 of their tokens
LARGEST_LOG2 = 92.0  # of a factor that grows: bfloat16 and float32 hold it
# The same where decays per token want a gradient: pairs of tokens after t contribute to the
# gradients of t sums that cancel, the more the decays differ between tokens.
LARGEST_LOG2_OF_GRADIENTS = 12.0
_LOG2_E = 1.4426950408889634


def merged_pairs(size: Any) -> jax.Array:
  """[C, C] bool: the pairs of query i (row) and key j that meet where halves of `size` merge."""
  i, j = iota((TILE_WIDTH,) * 2, 0), iota((TILE_WIDTH,) * 2, 1)
  return ((i ^ j) >= size) & ((i ^ j) < 2 * size) & (i > j)


def subchunk_pairs(level: jax.Array) -> jax.Array:
  """[C, C] bool: the pairs of query i (row) and key j < i inside a subchunk of 2^level tokens."""
  i, j = iota((TILE_WIDTH,) * 2, 0), iota((TILE_WIDTH,) * 2, 1)
  return ((i ^ j) < jnp.left_shift(jnp.int32(1), level)) & (i > j)


def meet_at_start(
  queries_log2: jax.Array, limit: float, at: ChunkIndex, documents: Any, vector_smem: Ref
) -> tuple[jax.Array, jax.Array]:
  """[C] bool, the queries whose pairs meet at the chunk's start, and whether all do.

  Each for itself, by the decay from the start, and only in the document of the chunk's first token:
  so a score depends, to the last bit, on nothing that follows it and on no other document.

  Args:
    queries_log2: [C, 64]: log2 of the decay from the start to each query, of `from_start`.
    vector_smem: [C] float32.
  """
  lowest = jnp.min(queries_log2, axis=1)
  vector_smem[...] = lowest
  meet, all_meet = lowest >= -limit, vector_smem[at.size - 1] >= -limit  # sums only fall
  first_document = documents.starts_with(at)
  if first_document is not None:
    meet, all_meet = meet & first_document[0], all_meet & first_document[1]
  return meet, all_meet


class DecayBuffers(NamedTuple):
  """SMEM of decays per token; all None for constant decays."""

  high: Any  # [C, 64]: the leading bfloat16 digits of log2 decays
  low: Any  # [C, 64]: the digits that follow
  spans: Any  # [C, C]: 1 where the exponent of a token (row) sums over another (column)

  @classmethod
  def of(cls, log_decay: jax.Array) -> "DecayBuffers":
    """For decays [H, K] or [B, T, H, K]."""
    if log_decay.ndim == 2:
      return cls(None, None, None)
    return cls(*(smem_tile(TILE_WIDTH, TILE_WIDTH) for _ in range(3)))


class ConstantDecay:
  """One decay per key channel, the same at every token: exponents are counts of tokens."""

  def __init__(self, log_decay_gmem: Ref, read_first: bool, valid: jax.Array):
    """
    Args:
      log_decay_gmem: [64] float32.
      read_first: whether queries see the state before the decay of their own token.
      valid: tokens of the chunk before padding.
    """
    log2 = jnp.maximum(load_col_vector(log_decay_gmem), SMALLEST_LOG_DECAY) * _LOG2_E
    self.log2 = broadcast_cols(log2, (TILE_WIDTH,) * 2)
    self._own, self._valid = 0 if read_first else 1, valid

  def exponent(self, which: Any) -> jax.Array:
    """[C, 64]: log2 of `factor`."""
    return self._counts(which) * self.log2

  def factor(self, which: Any) -> jax.Array:
    """[C, 64]: the decay over the tokens of `which`, `BEFORE`, `AFTER` or the size of halves."""
    return jnp.exp2(self.exponent(which))

  def level(self, vector_smem: Ref) -> jax.Array:
    """int32: log2 of the tokens of a subchunk; 0 where the fastest channel allows none.

    Args:
      vector_smem: [C] float32, to be overwritten.
    """
    vector_smem[...] = jnp.min(self.log2, axis=1)
    fastest = -vector_smem[0]
    # The largest factor: of the second query of a subchunk, or of the last key but one.
    fits = (fastest * ((1 << level) // 2 - 1) <= LARGEST_LOG2 for level in SUBCHUNKS)
    count: Any = sum(jnp.where(fit, jnp.int32(1), 0) for fit in fits)
    return jnp.where(count > 0, count + (SUBCHUNKS[0] - 1), 0)

  def in_subchunk(self, level: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[C, 64]: the factors of queries and keys for the pairs `subchunk_pairs(level)`."""
    size = jnp.left_shift(jnp.int32(1), level)
    i = plgpu.broadcasted_iota(jnp.int32, (TILE_WIDTH,), 0, layout=ROW_LAYOUT)
    query = (i & (size - 1)) - (size >> 1)  # tokens from the middle

    def factor(counts):
      exponent = broadcast_rows(counts.astype(jnp.float32), (TILE_WIDTH,) * 2) * self.log2
      return jnp.exp2(jnp.minimum(exponent, LARGEST_LOG2))

    return factor(query), factor((self._own - 1) - query)

  def lags(self) -> jax.Array:
    """[C, C] float32: how many tokens decay between query i and key j, of pairs i > j."""
    i, j = iota((TILE_WIDTH,) * 2, 0), iota((TILE_WIDTH,) * 2, 1)
    return (i - j - (1 - self._own)).astype(jnp.float32)

  def gradient(self, acc: jax.Array | None, x: jax.Array, which: Any, staging_smem: Ref):
    """`acc` plus the part of the log decays' gradient through the factors of `which`.

    Args:
      x: [C, 64] float32, the factors times their cotangents.
      staging_smem: [C, 64], to be overwritten.
    """
    del staging_smem
    added = self._counts(which) * x
    return added if acc is None else acc + added

  def _counts(self, which):
    i = plgpu.broadcasted_iota(jnp.int32, (TILE_WIDTH,), 0, layout=ROW_LAYOUT)
    if which is BEFORE:
      counts = i + self._own
    elif which is AFTER:
      counts = jnp.maximum(self._valid - 1 - i, 0)
    else:
      place = i & (which - 1)
      counts = jnp.where((i & which) != 0, place + self._own, which - 1 - place)
    return broadcast_rows(counts.astype(jnp.float32), (TILE_WIDTH,) * 2)


class TokenDecay:
  """One decay per token and key channel: exponents are products with a matrix of 0 and 1.

  A log decay is split into two bfloat16 numbers, which hold it to 2^-17 of itself; since the terms
  of a sum have one sign, so is the sum. Methods as those of `ConstantDecay`.
  """

  def __init__(self, log_decay_gmem: Ref, read_first: bool, smem: DecayBuffers, backend: Mma):
    """`log_decay_gmem`: [C, 64] float32."""
    log_decay = plgpu.load(log_decay_gmem, layout=plgpu.Layout.WGMMA, optimized=False)
    log2 = jnp.maximum(log_decay, SMALLEST_LOG_DECAY) * _LOG2_E
    high = log2.astype(jnp.bfloat16)
    smem.high[...] = high
    smem.low[...] = (log2 - high.astype(jnp.float32)).astype(jnp.bfloat16)
    self._smem, self._read_first, self._backend = smem, read_first, backend

  @property
  def log2(self) -> jax.Array:
    """[C, 64]: log2 decays, from SMEM: registers are few."""
    return load_tile(self._smem.high) + load_tile(self._smem.low)

  def factor(self, which: Any) -> jax.Array:
    """As `ConstantDecay.factor`; leaves the tokens of `which` in SMEM, for `gradient`."""
    return jnp.exp2(self.exponent(which))

  def from_start(self) -> tuple[jax.Array, jax.Array]:
    """[C, 64]: log2 of the decay from the chunk's start to each query, and to each key.

    Leaves the tokens of `BEFORE` in SMEM.
    """
    queries = self.exponent(BEFORE)
    return queries, queries + self.log2 if self._read_first else queries

  def exponent(self, which: Any) -> jax.Array:
    """As `ConstantDecay.exponent`; leaves the tokens of `which` in SMEM, for `gradient`."""
    smem = self._smem
    smem.spans[...] = jnp.where(self._tokens(which), jnp.float32(1.0), 0.0).astype(jnp.bfloat16)
    pairs = [(smem.spans, smem.high), (smem.spans, smem.low)]
    return self._backend.dots(Dots(pairs))[0]

  def gradient(self, acc: jax.Array | None, x: jax.Array, which: Any, staging_smem: Ref):
    """As `ConstantDecay.gradient`, after `factor` of the same `which`."""
    del which
    staging_smem[...] = x.astype(jnp.bfloat16)
    return self._backend.dot(transpose_ref(self._smem.spans), staging_smem, start=acc)

  def _tokens(self, which):
    i, t = iota((TILE_WIDTH,) * 2, 0), iota((TILE_WIDTH,) * 2, 1)
    up_to = t < i if self._read_first else t <= i
    if which is BEFORE:
      return up_to
    if which is AFTER:
      return t > i
    in_second = (i & which) != 0
    return ((i ^ t) < which) & ((in_second & up_to) | (~in_second & (t > i)))


def decay_of_block(
  log_decay_gmem: Ref,  # [H, K] or [B, T, H, K]
  at: ChunkIndex,
  channels: pl.Slice,
  smem: DecayBuffers,
  *,
  heads: int,  # H
  length: int,  # tokens before padding
  read_first: bool,
  backend: Mma,
) -> ConstantDecay | TokenDecay:
  """The decays of 64 channels in a chunk."""
  if len(log_decay_gmem.shape) == 2:
    valid = jnp.clip(length - at.chunk * at.size, 0, at.size)
    return ConstantDecay(log_decay_gmem.at[at.head, channels], read_first, valid)
  head = shared_head(at.head, heads, log_decay_gmem)
  log_decay_gmem = log_decay_gmem.at[at.batch, at.tokens, head, channels]
  return TokenDecay(log_decay_gmem, read_first, smem, backend)

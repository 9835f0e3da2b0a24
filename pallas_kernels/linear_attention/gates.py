"""Decays inside a chunk, per key channel, without a difference of cumulative sums.

A pair of steps i > j is weighted by the decays of the steps between them: by a factor of query i
times a factor of key j, which are exponentials of sums up to the place where the two meet.

* Inside a block they meet at its middle, where one factor may grow: as far as exp(63), which
  bfloat16 and float32 hold. Blocks have 8, 16, 32 or 64 steps, the most for which all channels stay
  below that: with decays above exp(-2) a step the whole chunk is one block. Decays below exp(-21)
  a step are taken as exp(-21), so that blocks of 8 always do.
* Blocks are merged two by two, and pairs of two halves meet at the border between them: sums of
  terms of one sign, factors of at most 1.

`first` is how many merges the blocks make superfluous, 0 to 3. Both classes have, for 64 channels:

* `in_block()`: what queries and keys are multiplied by before their product for
  `in_block_pairs(first)`; `merged(size)`: the same for `merged_pairs(size)`, where both have it;
* `before()`, `after()`: from the chunk's start to each step, from each step to the chunk's end;
* `owe(due, x, d_x, which, staging)`: adds to what the log decays are due what one of these factors
  is: x times d_x, the cotangent of x that came through that factor. Of constant decays without
  the factor x, the same for all: their gradient is the sum over steps of x times that.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tensor_core import (
  CHUNK,
  GROUP,
  ROWS,
  across,
  columns_of,
  down,
  iota,
  multiply,
  turned,
)

SMALLEST_LOG_DECAY = -21.0
MERGES = 3  # blocks of 8 become 16, 32 and 64
_LOG2_E = 1.4426950408889634
_BLOCK, _LOG2_BLOCK = 8, 3
LARGEST_LOG2 = 92.0  # of a factor: exp(63.8)
_SHAPE = (CHUNK, GROUP)

# What a factor sums over. Those of merges are named by the size of their halves, a number.
BEFORE, AFTER, QUERIES, KEYS = "before", "after", "queries of a block", "keys of a block"


def half_of(merge):
  """The steps in each half at merge 0, 1 or 2."""
  return _BLOCK << merge


def superfluous_merges(log_decay):
  """[...] int32, 0 to 3: how many merges all of the last axis of constant decays can do without."""
  return _of_constant(-jnp.min(log_decay, axis=-1))


def superfluous_for(rates, scratch):
  """The same in a kernel, of 64 rates in registers. `scratch`: memory for 128 numbers."""
  return _of_constant(_largest(rates, scratch))


def _of_constant(fastest):
  return _superfluous(jnp.minimum(fastest, -SMALLEST_LOG_DECAY) * _LOG2_E, LARGEST_LOG2)


def _largest(x, scratch):
  """The largest of 64 numbers, for all threads."""
  for half in (0, CHUNK):  # the maximum of all wants a number for each thread
    scratch.at[pl.ds(half, CHUNK)][...] = x
  plgpu.commit_smem()
  return jnp.max(plgpu.load(scratch, layout=plgpu.Layout.WG_STRIDED((2 * CHUNK,), vec_size=1)))


def _superfluous(fastest, limit):
  """int32: for how many sizes of blocks no factor is above 2^limit. `fastest`: log2, a step."""
  # The largest factor: of the second query of a block, or of the last key but one.
  sizes = [half_of(merge + 1) for merge in range(MERGES)]
  one, none = jnp.int32(1), jnp.int32(0)
  return sum(jnp.where(fastest * (size // 2 - 1) <= limit, one, none) for size in sizes)


def _places(is_turned):
  """Rows and columns of [C, C], or columns and rows, and the blocks of 8 that they are in.

  Which block it is costs the compiler little, for it knows the layout.
  """
  shape = (CHUNK, CHUNK)
  i, j = iota(shape, int(is_turned)), iota(shape, 1 - int(is_turned))
  return i, j, i >> _LOG2_BLOCK, j >> _LOG2_BLOCK


def in_block_pairs(first, *, turned=False):
  """[C, C]: the pairs i > j inside a block. Rows are i, columns j, or the other way round."""
  i, j, i_block, j_block = _places(turned)
  later = (i & (_BLOCK - 1)) > (j & (_BLOCK - 1))
  later = (i_block > j_block) | ((i_block == j_block) & later)
  return ((i_block ^ j_block) < (1 << first)) & later


def merged_pairs(size, *, turned=False):
  """[C, C]: the pairs i > j that meet where halves of `size` are merged."""
  _, _, i_block, j_block = _places(turned)
  apart, half = i_block ^ j_block, size >> _LOG2_BLOCK
  return (apart >= half) & (apart < 2 * half) & (i_block > j_block)


def step_numbers():
  """[C]: the numbers of a chunk's steps, one for each row."""
  return plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=ROWS)


class ConstantGates:
  """One decay per key channel, the same at every step: sums are counts.

  Each factor is made when it is asked for, by an exponential for each step and channel. Products of
  those made before would save exponentials, but the registers that keep them cost more.
  """

  def __init__(self, log_decay, first, read_first, valid):
    """
    Args:
      log_decay: [K] float32, in device memory: of 64 channels, or of all for factors alone.
      first: of `superfluous_merges` for these channels, or less.
      read_first: whether queries see the state before the decay of their own step.
      valid: steps of this chunk before padding.
    """
    self._log2 = jnp.maximum(columns_of(log_decay), SMALLEST_LOG_DECAY) * _LOG2_E
    self._read_first, self._valid = int(read_first), valid
    self._shape = CHUNK, log_decay.shape[0]
    self.first = first

  def _powers(self, counts):
    shape = self._shape
    return jnp.exp2(across(counts.astype(jnp.float32), shape) * down(self._log2, shape))

  def in_block(self):
    """The factors of queries and keys, [C, 64] each, of the pairs inside a block.

    But 1 for the first query and the last key of a block, which meet nothing: they would be the
    largest, and infinite times a large key.
    """
    last = half_of(self.first) - 1
    place = step_numbers() & last
    queries, keys = self._count(QUERIES), self._count(KEYS)
    queries, keys = jnp.where(place > 0, queries, 0), jnp.where(place < last, keys, 0)
    return self._powers(queries), self._powers(keys)

  def merged(self, size):
    """[C, 64]: the factor of queries and keys where halves of `size` are merged."""
    return self._factor(size)

  def _count(self, which):
    """[C]: how many steps the sum of `which` has for each row; below zero: to be divided by."""
    i = step_numbers()
    if which is BEFORE:
      return i + (1 - self._read_first)
    if which is AFTER:
      return jnp.maximum(self._valid - 1 - i, 0)
    if which is QUERIES or which is KEYS:
      block = half_of(self.first)
      position, middle = i & (block - 1), (block >> 1) - 1
      return position - (middle + self._read_first) if which is QUERIES else middle - position
    position = i & (which - 1)
    second = (i & which) != 0
    return jnp.where(second, position + (1 - self._read_first), which - 1 - position)

  def _factor(self, which):
    return self._powers(self._count(which))

  def lags(self):
    """[C, C] float32: how many steps decay between query i and key j, of pairs i > j."""
    lags = iota((CHUNK, CHUNK), 0) - iota((CHUNK, CHUNK), 1) - self._read_first
    return lags.astype(jnp.float32)

  def before(self):
    """[C, 64]."""
    return self._factor(BEFORE)

  def after(self):
    """[C, 64]."""
    return self._factor(AFTER)

  def owe(self, due, x, d_x, which, staging):
    """`x()` and `d_x` are [C, 64], `staging` a tile of that shape that may be overwritten."""
    del x, staging
    added = across(self._count(which).astype(jnp.float32), self._shape) * d_x
    return added if due is None else due + added


class Signs:
  """A tile [C, C] that holds one 0/1 matrix of sums after the other."""

  def __init__(self, tile, read_first):
    """`read_first`: whether queries see the state before the decay of their own step."""
    self._tile, self.read_first, self._held = tile, bool(read_first), None

  def of(self, which, first):
    """The tile, with how often each step counts in the sums of `which`."""
    held = self._held is not None and self._held[0] is which and self._held[1] is first
    if not held:
      self._tile[...] = _signs(which, first, self.read_first).astype(jnp.bfloat16)
      plgpu.commit_smem()
      self._held = which, first
    return self._tile


class StepGates:
  """A decay per step and key channel. Sums are products with 0/1 matrices on the tensor cores.

  A log decay is split into two bfloat16 numbers, which hold it to 2^-17 of itself; since the terms
  of a sum have one sign, so are the sums.
  """

  def __init__(self, log_decay, high, low, signs, interpret):
    """
    Args:
      log_decay: [C, 64] float32, in device memory.
      high, low: tiles [C, 64] for this object alone.
      signs: `Signs`, which several objects may share.
    """
    log_decay = plgpu.load(log_decay, layout=plgpu.Layout.WGMMA, optimized=False)
    self.log2_decay = jnp.maximum(log_decay, SMALLEST_LOG_DECAY) * _LOG2_E
    rounded = self.log2_decay.astype(jnp.bfloat16)
    high[...] = rounded
    low[...] = (self.log2_decay - rounded.astype(jnp.float32)).astype(jnp.bfloat16)
    self._high, self._low, self._signs = high, low, signs
    self._read_first, self._interpret = signs.read_first, interpret
    self.first = 0

  def _sum(self, which):
    signs = self._signs.of(which, self.first)
    products = [(signs, self._high), (signs, self._low)]
    return multiply((_SHAPE, products), interpret=self._interpret)[0]

  def choose(self, largest, limit):
    """Sets `first` by the fastest decay.

    Args:
      largest: shared memory for 128 numbers.
      limit: log2 of how far a factor may grow.
    """
    self.first = _superfluous(_largest(jnp.max(-self.log2_decay, axis=1), largest), limit)

  def from_start(self):
    """[C, 64]: log2 of the decay from the chunk's start to each query, and to each key."""
    queries = self._sum(BEFORE)
    return queries, queries + self.log2_decay if self._read_first else queries

  def in_block(self):
    """The factors of queries and keys, [C, 64] each, of the pairs inside a block.

    But at most 2^92, as no pair needs more: those of the first query and of the last key of a
    block, which meet nothing, would be the largest, and infinite times a large key.
    """
    queries = self._sum(QUERIES)
    keys = self._sum(KEYS) if self._read_first else -queries
    return tuple(jnp.exp2(jnp.minimum(x, LARGEST_LOG2)) for x in (queries, keys))

  def merged(self, size):
    """[C, 64]: the factor of queries and keys where halves of `size` are merged."""
    return jnp.exp2(self._sum(size))

  def before(self):
    """[C, 64]."""
    return jnp.exp2(self._sum(BEFORE))

  def after(self):
    """[C, 64]."""
    return jnp.exp2(self._sum(AFTER))

  def owe(self, due, x, d_x, which, staging):
    """`x()` and `d_x` are [C, 64], `staging` a tile of that shape that may be overwritten."""
    d_log = x() * d_x
    if which is KEYS and not self._read_first:
      which, d_log = QUERIES, -d_log
    signs = self._signs.of(which, self.first)
    staging[...] = d_log.astype(jnp.bfloat16)
    plgpu.commit_smem()
    start = _SHAPE if due is None else due
    return multiply((start, [(turned(signs), staging)]), interpret=self._interpret)[0]


def _signs(which, first, read_first):
  """[C, C], -1, 0 or 1: how often step t (column) counts in the sum of row i."""
  i, t, i_block, t_block = _places(False)
  same = i_block == t_block
  i_place, t_place = i & (_BLOCK - 1), t & (_BLOCK - 1)
  own_step = which is KEYS or not read_first
  up_to = (t_place <= i_place) if own_step else (t_place < i_place)
  one, none = jnp.float32(1.0), jnp.float32(0.0)
  up_to = (t_block < i_block) | (same & up_to)
  if which is QUERIES or which is KEYS:
    last = half_of(first) - 1
    late = (t & last) > (last >> 1)
    plus, minus = (one, -one) if which is QUERIES else (-one, one)
    in_block = jnp.where(late & up_to, plus, jnp.where(late | up_to, none, minus))
    return jnp.where((i_block ^ t_block) < (1 << first), in_block, none)
  if which is BEFORE:
    return jnp.where(up_to, one, none)
  later = (t_block > i_block) | (same & (t_place > i_place))
  if which is AFTER:
    return jnp.where(later, one, none)
  half = which >> _LOG2_BLOCK
  in_second = (i_block & half) != 0
  counts = (in_second & up_to) | (~in_second & later)
  return jnp.where(counts & ((i_block ^ t_block) < half), one, none)

"""Decays inside a chunk, per key channel, without a difference of cumulative sums.

A pair of steps i > j of a chunk is weighted by the decays of the steps between them. Blocks of 8,
16 and 32 steps are merged two by two; every pair at least one block of 8 apart meets at exactly one
merge, and there the weight is exp(sum from the border to i) * exp(sum from j to the border): sums
of terms of one sign, factors of at most 1. Pairs inside a block of 8 meet at its middle instead;
there one factor may grow to exp(4 * 21), which bfloat16 and float32 hold, and decays below exp(-21)
a step are taken as exp(-21).

Both classes have, for 64 key channels:

* `in_block()`: what queries and keys are multiplied by before their product for `pairs(0)`;
  `merged(size)`: the same for `pairs(size)`, where the two have equal factors; `meetings()`: all;
* `before()`, `after()`: from the chunk's start to each step, from each step to the chunk's end;
* `owe(x, d_x, which, staging)`: takes what one of these factors is due: x times d_x, the cotangent
  of x that came through that factor. `due(x)` is their sum, the gradient of the log decay.
"""

import jax.numpy as jnp
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
_LOG2_E = 1.4426950408889634
_BLOCK, _LOG2_BLOCK = 8, 3
_MIDDLE = _BLOCK // 2 - 1  # the step of a block after which its pairs meet
MERGES = (8, 16, 32)  # the steps in each half
_SHAPE = (CHUNK, GROUP)

# What a factor sums over. Merges are named by the size of their halves.
BEFORE, AFTER, QUERIES, KEYS = "before", "after", "queries of a block", "keys of a block"


def pairs(size, *, turned=False):
  """[C, C]: the pairs i > j that meet where halves of `size` are merged; 0: inside a block.

  Rows are i and columns j, or the other way round if `turned`.
  """
  shape = (CHUNK, CHUNK)
  i, j = iota(shape, int(turned)), iota(shape, 1 - int(turned))
  # By blocks of 8: which block a number is in costs the compiler nothing, for it knows the layout.
  i_block, j_block = i >> _LOG2_BLOCK, j >> _LOG2_BLOCK
  if not size:
    return (i_block == j_block) & ((i & (_BLOCK - 1)) > (j & (_BLOCK - 1)))
  apart, half = i_block ^ j_block, size // _BLOCK
  return (apart >= half) & (apart < 2 * half) & (i_block > j_block)


def _in_block(queries, keys):
  """The factors of a block without those of its first query and last key, which meet nothing.

  They are the largest: times a large key one could be infinite, and 0 times it would be NaN.
  """
  place = iota(_SHAPE, 0) & (_BLOCK - 1)
  return jnp.where(place > 0, queries, 0.0), jnp.where(place < _BLOCK - 1, keys, 0.0)


class ConstantGates:
  """One decay per key channel, the same at every step: sums are counts.

  Each factor is made when it is asked for, by an exponential for each step and channel. Products of
  those made before would save exponentials, but the registers that keep them cost more.
  """

  def __init__(self, log_decay, read_first, valid):
    """
    Args:
      log_decay: [64] float32, in device memory.
      read_first: whether queries see the state before the decay of their own step.
      valid: steps of this chunk before padding.
    """
    self._log2 = jnp.maximum(columns_of(log_decay), SMALLEST_LOG_DECAY) * _LOG2_E
    self._read_first, self._valid = int(read_first), valid
    self._due = None

  def _powers(self, counts):
    return jnp.exp2(across(counts.astype(jnp.float32), _SHAPE) * down(self._log2, _SHAPE))

  def in_block(self):
    """The factors of queries and keys, [C, 64] each, of the pairs inside a block."""
    return _in_block(self._factor(QUERIES), self._factor(KEYS))

  def merged(self, size):
    """[C, 64]: the factor of queries and keys where halves of `size` are merged."""
    return self._factor(size)

  def meetings(self):
    """Yields (size, factor of queries, factor of keys), [C, 64] each."""
    yield 0, *self.in_block()
    for size in MERGES:
      both = self.merged(size)
      yield size, both, both

  def _factor(self, which):
    rows = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=ROWS)
    return self._powers(_count(which, rows, self._read_first, self._valid))

  def before(self):
    """[C, 64]."""
    return self._factor(BEFORE)

  def after(self):
    """[C, 64]."""
    return self._factor(AFTER)

  def owe(self, x, d_x, which, staging):
    """`x()` and `d_x` are [C, 64], `staging` a tile of that shape that may be overwritten."""
    del x, staging
    rows = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=ROWS)
    counts = _count(which, rows, self._read_first, self._valid).astype(jnp.float32)
    added = across(counts, _SHAPE) * d_x
    self._due = added if self._due is None else self._due + added

  def due(self, x):
    """[64], one number per column."""
    return jnp.sum(x() * self._due, axis=0)


def _count(which, i, read_first, valid):
  """How many steps the sum for row i of `which` has; below zero: to be divided by."""
  position = i & (_BLOCK - 1)
  if which == BEFORE:
    return i + (1 - read_first)
  if which == AFTER:
    return jnp.maximum(valid - 1 - i, 0)
  if which == QUERIES:
    return position - (_MIDDLE + read_first)
  if which == KEYS:
    return _MIDDLE - position
  position = i & (which - 1)
  second = (i & which) != 0
  return jnp.where(second, position + (1 - read_first), which - 1 - position)


class Signs:
  """A tile [C, C] that holds one 0/1 matrix of sums after the other."""

  def __init__(self, tile, read_first):
    """`read_first`: whether queries see the state before the decay of their own step."""
    self._tile, self.read_first, self._held = tile, bool(read_first), None

  def of(self, which):
    """The tile, with how often each step counts in the sums of `which`."""
    if self._held != which:
      self._tile[...] = _signs(which, self.read_first).astype(jnp.bfloat16)
      plgpu.commit_smem()
      self._held = which
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
    self._due = None

  def _sum(self, which):
    signs = self._signs.of(which)
    products = [(signs, self._high), (signs, self._low)]
    return multiply((_SHAPE, products), interpret=self._interpret)[0]

  def in_block(self):
    """The factors of queries and keys, [C, 64] each, of the pairs inside a block."""
    queries = self._sum(QUERIES)
    keys = self._sum(KEYS) if self._read_first else -queries
    return _in_block(jnp.exp2(queries), jnp.exp2(keys))

  def merged(self, size):
    """[C, 64]: the factor of queries and keys where halves of `size` are merged."""
    return jnp.exp2(self._sum(size))

  def meetings(self):
    """Yields (size, factor of queries, factor of keys), [C, 64] each."""
    yield 0, *self.in_block()
    for size in MERGES:
      both = self.merged(size)
      yield size, both, both

  def before(self):
    """[C, 64]."""
    return jnp.exp2(self._sum(BEFORE))

  def after(self):
    """[C, 64]."""
    return jnp.exp2(self._sum(AFTER))

  def start_due(self, due):
    """Where the sum of what is owed starts, [C, 64] float32."""
    self._due = due

  def owe(self, x, d_x, which, staging):
    """`x()` and `d_x` are [C, 64], `staging` a tile of that shape that may be overwritten."""
    d_log = x() * d_x
    if which == KEYS and not self._read_first:
      which, d_log = QUERIES, -d_log
    signs = self._signs.of(which)
    staging[...] = d_log.astype(jnp.bfloat16)
    plgpu.commit_smem()
    start = _SHAPE if self._due is None else self._due
    (self._due,) = multiply((start, [(turned(signs), staging)]), interpret=self._interpret)

  def due(self, x):
    """[C, 64]."""
    del x
    return self._due


def _signs(which, read_first):
  """[C, C], -1, 0 or 1: how often step t (column) counts in the sum of row i."""
  shape = (CHUNK, CHUNK)
  i, t = iota(shape, 0), iota(shape, 1)
  i_block, t_block = i >> _LOG2_BLOCK, t >> _LOG2_BLOCK
  i_place, t_place = i & (_BLOCK - 1), t & (_BLOCK - 1)
  same = i_block == t_block
  up_to = (t_place < i_place) if read_first else (t_place <= i_place)
  one, none = jnp.float32(1.0), jnp.float32(0.0)
  if which in (QUERIES, KEYS):
    if which == KEYS:
      up_to = t_place <= i_place
    late, early = (t_place > _MIDDLE) & up_to, (t_place <= _MIDDLE) & ~up_to
    plus, minus = (one, -one) if which == QUERIES else (-one, one)
    in_block = jnp.where(late, plus, jnp.where(early, minus, none))
    return jnp.where(same, in_block, none)
  earlier = jnp.where(same, jnp.where(up_to, one, none), jnp.where(t_block < i_block, one, none))
  if which == BEFORE:
    return earlier
  late_in_block = jnp.where(t_place > i_place, one, none)
  later = jnp.where(same, late_in_block, jnp.where(t_block > i_block, one, none))
  if which == AFTER:
    return later
  half = which // _BLOCK
  counts = jnp.where((i_block & half) != 0, earlier, later)
  return jnp.where((i_block ^ t_block) < half, counts, none)

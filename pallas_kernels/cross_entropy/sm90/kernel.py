"""Cross-entropy of float32 logits and its gradient: one kernel, which loads each logit once.

    largest = max(z)      sum = sum exp(z - largest)      ties = number of z that equal largest
    d_j = w (exp(z_j - largest) / sum (1 + 2 z_loss log_sum) - [j = target]
             + [z_j = largest] logit_penalty largest / ties),      log_sum = largest + log(sum)

A persistent CTA per SM takes positions one after the other. The V logits of a position arrive as
chunks [chunk, 128] in a ring of SMEM slots, of which every consumer warpgroup has its own rows:

    producer    load chunks 0 1 2 ... of a position, then those of the next one, as slots get free
    consumers   pass 1: reduce each chunk when it arrives | exchange sums | pass 2: gradients from
                the same slots, staged and stored by TMA; release each slot

So the next position arrives during pass 2 and, in the slots that are left, during all of pass 1. If
a position does not fit in SMEM, or no gradient is stored, pass 1 releases the slots, and pass 2
has its chunks loaded once more.

In pass 1 every thread has sums of its own, relative to its own maximum; they meet once per
position: in a warp by shuffles, over warps in SMEM, which each consumer adds in the same order.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import device
from pallas_kernels.core.pipeline import Pipeline, PipelineBarriers
from pallas_kernels.core.wgmma import WITHOUT_SCRATCH, store_unoptimized, with_int32_indices
from pallas_kernels.cross_entropy.config import LANES, TILE
from pallas_kernels.cross_entropy.types import NUM_STATISTICS, Inputs, Results, Static

_LOWEST = float(jnp.finfo(jnp.float32).min)  # finite, because -inf - (-inf) would be NaN
_WARPS = 4  # per warpgroup
# A warp has rows of 128 logits, four adjacent ones per thread.
_LAYOUT = plgpu.Layout.TILED(
  plgpu.Tiling(((TILE, LANES), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


class _Scratch(NamedTuple):
  slots: Any  # [slots, chunk, LANES] float32
  staged: Any  # [consumers, 2, share, LANES] in the dtype of the gradient, or None
  sums: Any  # [2, 3, warps] float32: largest, sum and ties of each warp, of two positions
  barriers: PipelineBarriers
  exchanged: Any  # barrier: all consumers have stored their sums


class _Sums(NamedTuple):
  """Sums over the logits that a thread has seen, or all of them."""

  largest: Any
  total: Any  # of exp(z - largest)
  ties: Any  # None without a penalty


@with_int32_indices
def cross_entropy(inputs: Inputs, static: Static) -> Results:
  """Statistics and gradients of all positions."""
  R, rows, _ = inputs.logits.shape
  config, G = static.config, static.config.consumers
  gradient = static.dtype is not None
  ctas = min(device.current().sm_count, R)  # one per SM
  pipelined = lambda arrivals: plgpu.Barrier(num_arrivals=arrivals, num_barriers=config.slots)
  staged = (G, 2, config.share, LANES)
  scratch = _Scratch(
    slots=plgpu.SMEM((config.slots, config.chunk, LANES), jnp.float32),
    staged=plgpu.SMEM(staged, static.dtype) if gradient else None,
    sums=plgpu.SMEM((2, len(_Sums._fields), G * _WARPS), jnp.float32),
    barriers=PipelineBarriers(loaded=pipelined(1), consumed=pipelined(G)),
    exchanged=plgpu.Barrier(num_arrivals=G),
  )
  out_type = Results(
    jax.ShapeDtypeStruct((R, NUM_STATISTICS), jnp.float32),
    jax.ShapeDtypeStruct(inputs.logits.shape, static.dtype) if gradient else None,
  )

  def body(gmem: Inputs, outs: Results, smem: _Scratch):
    cta = lax.axis_index("cta")
    own = R // ctas + (cta < R % ctas).astype(jnp.int32)
    shared = _Cta(static, gmem, outs, smem, rows, own, lambda n: cta + n * ctas)
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == 0)(shared.produce)
    pl.when(warpgroup > 0)(lambda: _Consumer(shared, warpgroup - 1).consume())

  (results,) = plgpu.kernel(
    body,
    out_type=[out_type],
    scratch_types=[scratch],
    grid=(ctas,),
    grid_names=("cta",),
    num_threads=1 + G,
    thread_name="warpgroup",
    interpret=static.interpret,
    kernel_name="cross_entropy" + ("_gradient" if gradient else ""),
    compiler_params=WITHOUT_SCRATCH,
  )(inputs)
  return results


class _Cta:
  """Positions, chunks and slots of one CTA; the producer."""

  def __init__(self, static, gmem, outs, smem, rows, own, position):
    self.static, self.config = static, static.config
    self.gmem, self.outs, self.smem = gmem, outs, smem
    self.own, self.position = own, position  # positions of the CTA, and the n-th of them
    self.N = self.config.num_chunks(rows * LANES)
    self.last_rows = rows - (self.N - 1) * self.config.chunk
    self.gradient = static.dtype is not None
    self.resident = self.gradient and self.config.resident(rows * LANES)
    self.loads = 2 if self.gradient and not self.resident else 1  # of each chunk
    self.pipeline = Pipeline(self.N, self.config.slots, smem.barriers)

  def first_load(self, n, again: int):
    """The number of the load of chunk 0 of the n-th position, for its second pass if `again`."""
    return (n * self.loads + (again if self.loads > 1 else 0)) * self.N

  def produce(self) -> None:
    """Loads all chunks of all positions, in the order in which they are read."""
    chunk, slots = self.config.chunk, self.config.slots
    consumed = self.smem.barriers.consumed

    def load(number, position, c, rows):
      slot = self.pipeline.slot(number)
      pl.when(number >= slots)(lambda: plgpu.barrier_wait(consumed.at[slot]))
      plgpu.copy_gmem_to_smem(
        self.gmem.logits.at[position, pl.ds(c * chunk, rows)],
        self.smem.slots.at[slot, pl.ds(0, rows)],
        self.pipeline.loaded_barrier(number),
      )

    def load_position(n, _):
      position = self.position(n)
      for again in range(self.loads):
        first = self.first_load(n, again)
        whole = lambda c, _, first=first: load(first + c, position, c, chunk)
        lax.fori_loop(0, self.N - 1, whole, None)
        load(first + self.N - 1, position, self.N - 1, self.last_rows)

    lax.fori_loop(0, self.own, load_position, None)
    # Drain: every consumer has released every slot before the producer exits.
    total = self.first_load(self.own, 0)
    drain = lambda n, _: plgpu.barrier_wait(consumed.at[self.pipeline.slot(n)])
    lax.fori_loop(jnp.maximum(total - slots, 0), total, drain, None)


class _Consumer:
  """A consumer warpgroup: its rows of every chunk."""

  def __init__(self, cta: _Cta, index):
    self.cta, self.index = cta, index
    self.static, self.config, self.smem = cta.static, cta.config, cta.smem
    self.pipeline = cta.pipeline
    share = (self.config.share, LANES)
    iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, share, axis, layout=_LAYOUT)
    self.places = iota(0) * LANES + iota(1)  # columns, counted from the first of the own rows
    self.has_last_rows = index * self.config.share < cta.last_rows
    self.num_stores = cta.N - 1 + self.has_last_rows.astype(jnp.int32)  # per position

  def consume(self) -> None:
    """All positions of the CTA."""
    load = lambda n: (self.cta.gmem.targets[n], self.cta.gmem.weights[n])
    last = self.cta.own - 1

    def step(n, arrived):
      target, weight = arrived
      # Numbers of the next position are loaded ahead: they come straight from GMEM.
      ahead = load(self.cta.position(jnp.minimum(n + 1, last)))
      statistics, target_logit = self.reduce(n, target)
      self.store_statistics(n, statistics, target_logit)
      if self.cta.gradient:
        self.store_gradients(n, statistics, target, weight)
      return ahead

    lax.fori_loop(0, self.cta.own, step, load(self.cta.position(0)))
    if self.cta.gradient:
      plgpu.wait_smem_to_gmem(0)

  def first_column(self, c):
    """The column of the first logit of the own rows of chunk c."""
    return (c * self.config.chunk + self.index * self.config.share) * LANES

  def load(self, number, c, *, is_last: bool):
    """The own rows of chunk c. A last chunk is masked: a slot has other logits behind it."""
    own_rows = pl.ds(self.index * self.config.share, self.config.share)
    source = self.smem.slots.at[self.pipeline.slot(number), own_rows]
    z = plgpu.load(source, layout=_LAYOUT, optimized=False)
    if not is_last:
      return z
    return jnp.where(self.places < self.static.vocab_size - self.first_column(c), z, _LOWEST)

  def each_chunk(self, compute, carry):
    """`compute(c, carry, is_last)` for all chunks of a position in turn."""
    last = self.cta.N - 1
    carry = lax.fori_loop(0, last, lambda c, x: compute(c, x, is_last=False), carry)
    return compute(last, carry, is_last=True)

  def release(self, number) -> None:
    """The slot may be loaded again when it has been read: not before the registers are there."""
    plgpu.commit_smem()
    self.pipeline.release(number)

  # Pass 1

  def reduce(self, n, target) -> tuple[_Sums, Any]:
    """Sums over all logits of the n-th position, and the logit of its target."""
    first_load = self.cta.first_load(n, 0)
    full = lambda x: plgpu.layout_cast(jnp.full((TILE, LANES), x, jnp.float32), _LAYOUT)
    counts_ties = bool(self.static.logit_penalty)

    def compute(c, carry, *, is_last):
      sums, target_logit = carry
      number = first_load + c
      self.pipeline.wait_loaded(number)
      z = self.load(number, c, is_last=is_last)
      target_logit = self.select_target(number, c, target, target_logit)
      if not self.cta.resident:
        self.release(number)
      return self.add(sums, z), target_logit

    start = _Sums(full(_LOWEST), full(0.0), full(0.0) if counts_ties else None)
    sums, target_logit = self.each_chunk(compute, (start, jnp.float32(0.0)))
    return self.exchange(n, sums), target_logit

  def select_target(self, number, c, target, target_logit):
    """The logit of the target if chunk c has it, otherwise `target_logit`."""
    size = self.config.chunk * LANES
    place = target - c * size
    inside = (place >= 0) & (place < size)
    place = jnp.where(inside, place, 0)
    z = self.smem.slots[self.pipeline.slot(number), lax.div(place, LANES), lax.rem(place, LANES)]
    return jnp.where(inside, z, target_logit)

  def add(self, sums: _Sums, z) -> _Sums:
    """Adds logits to the sums of each thread, which become relative to its new maximum."""
    tiles = [z[r : r + TILE] for r in range(0, self.config.share, TILE)]
    largest = functools.reduce(jnp.maximum, tiles, sums.largest)
    total = sums.total * jnp.exp(sums.largest - largest)
    total = total + _tree_sum([jnp.exp(tile - largest) for tile in tiles])
    ties = sums.ties
    if ties is not None:
      ties = jnp.where(sums.largest == largest, ties, 0.0)
      ties = ties + _tree_sum([jnp.where(tile == largest, 1.0, 0.0) for tile in tiles])
    return _Sums(largest, total, ties)

  def exchange(self, n, sums: _Sums) -> _Sums:
    """Sums over all warps of all consumers, the same numbers for each."""
    largest = jnp.max(sums.largest, axis=1)
    spread = plgpu.layout_cast(lax.broadcast_in_dim(largest, (TILE, LANES), [0]), _LAYOUT)
    total = jnp.sum(sums.total * jnp.exp(sums.largest - spread), axis=1)
    ties = None
    if sums.ties is not None:
      ties = jnp.sum(jnp.where(sums.largest == spread, sums.ties, 0.0), axis=1)
    # Of two positions, because a consumer may be ahead of another that still reads.
    sums_smem = self.smem.sums.at[lax.rem(n, 2)]
    for field, value in enumerate((largest, total, ties)):
      if value is not None:
        sums_smem.at[field, pl.ds(self.index * _WARPS, _WARPS)][...] = value
    plgpu.barrier_arrive(self.smem.exchanged)
    plgpu.barrier_wait(self.smem.exchanged)
    warps = range(self.config.consumers * _WARPS)
    all_largest = [sums_smem[0, warp] for warp in warps]
    largest = functools.reduce(jnp.maximum, all_largest)
    total = _tree_sum([sums_smem[1, w] * jnp.exp(all_largest[w] - largest) for w in warps])
    if ties is not None:
      ties = _tree_sum([jnp.where(all_largest[w] == largest, sums_smem[2, w], 0.0) for w in warps])
    return _Sums(largest, total, ties)

  def store_statistics(self, n, sums: _Sums, target_logit) -> None:
    """Stores the statistics of the n-th position, one per warp, by the first consumer."""
    ties = jnp.float32(0.0) if sums.ties is None else sums.ties
    fields = plgpu.broadcasted_iota(jnp.int32, (NUM_STATISTICS,), 0, layout=_LAYOUT.reduce(1))
    values = target_logit
    for field, value in reversed(list(enumerate((sums.largest, sums.total, ties)))):
      values = jnp.where(fields == field, value, values)
    target_gmem = self.cta.outs.statistics.at[self.cta.position(n)]
    pl.when(self.index == 0)(lambda: store_unoptimized(target_gmem, values))

  # Pass 2

  def store_gradients(self, n, sums: _Sums, target, weight) -> None:
    """Stores the gradient by the logits of the n-th position."""
    static, cta = self.static, self.cta
    first_load = cta.first_load(n, 1)
    position = cta.position(n)
    factor = weight / sums.total
    if static.z_loss:
      log_sum = sums.largest + jnp.log(sums.total)
      factor = factor * (1.0 + 2.0 * static.z_loss * log_sum)
    if static.logit_penalty:
      # Ties share the gradient, as in jnp.max.
      share = weight * static.logit_penalty * sums.largest / sums.ties

    def staged_smem(c):
      return self.smem.staged.at[self.index, lax.rem(n * self.num_stores + c, 2)]

    def stage(number, c, is_last):
      z = self.load(number, c, is_last=is_last)
      d = jnp.exp(z - sums.largest) * factor
      d = jnp.where(self.places == target - self.first_column(c), d - weight, d)
      if static.logit_penalty:
        d = jnp.where(z == sums.largest, d + share, d)
      # Selected, not multiplied: a position of weight 0 may have logits that are not finite.
      d = jnp.where(weight != 0.0, d, 0.0)
      # All stores but the latest have left SMEM: the buffer of the one before is free.
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)
      staged_smem(c)[...] = d.astype(static.dtype)

    def compute(c, carry, *, is_last):
      number = first_load + c
      if not cta.resident:
        self.pipeline.wait_loaded(number)
      # A short last chunk may have no rows of this consumer.
      if_any = pl.when(self.has_last_rows) if is_last else lambda work: work()
      if_any(lambda: stage(number, c, is_last))
      self.release(number)
      if_any(lambda: self.store_staged(staged_smem(c), position, c, is_last=is_last))
      return carry

    self.each_chunk(compute, jnp.int32(0))

  def store_staged(self, staged_smem, position, c, *, is_last: bool) -> None:
    """Starts the copy of the own rows of chunk c to GMEM, without what is behind a short one."""
    d_logits, share = self.cta.outs.d_logits, self.config.share

    def store(consumer, rows):
      target = pl.ds(c * self.config.chunk + consumer * share, rows)
      source = staged_smem.at[pl.ds(0, rows)]
      plgpu.copy_smem_to_gmem(source, d_logits.at[position, target], commit_group=False)

    if not is_last or self.cta.last_rows == self.config.chunk:
      store(self.index, share)
    else:
      for consumer in range(self.config.consumers):  # the size of a copy is static
        rows = min(self.cta.last_rows - consumer * share, share)
        if rows > 0:
          pl.when(self.index == consumer)(lambda i=consumer, rows=rows: store(i, rows))
    plgpu.commit_smem_to_gmem_group()


def _tree_sum(terms):
  """The sum of several values, in a fixed order with a short chain of dependences."""
  while len(terms) > 1:
    pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
    terms = pairs + terms[2 * len(pairs) :]
  return terms[0]

"""Cross-entropy of float32 logits and its gradient: one kernel, which loads each logit once.

What it computes is in `sums.py`. A persistent CTA per SM takes positions one after the other. The V
logits of a position arrive as chunks [chunk, 128] in a ring of SMEM slots, of which every consumer
warpgroup has its own rows:

    producer    load chunks 0 1 2 ... of a position, then those of the next one, as slots get free
    consumers   pass 1: reduce each chunk when it arrives | exchange sums | pass 2: gradients from
                the same slots, staged and stored by TMA; release each slot

So the next position arrives during pass 2 and, in the slots that are left, during all of pass 1. If
a position does not fit in SMEM, or no gradient is stored, pass 1 releases the slots, and pass 2
has its chunks loaded once more.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import device
from pallas_kernels.core.pipeline import Pipeline, PipelineBarriers
from pallas_kernels.core.wgmma import WITHOUT_SCRATCH, store_unoptimized, with_int32_indices
from pallas_kernels.cross_entropy.config import LANES
from pallas_kernels.cross_entropy.sums import (
  LAYOUT,
  LOWEST,
  WARPS,
  Sums,
  add,
  gradient,
  no_sums,
  of_all,
  of_warps,
  places,
  statistics,
)
from pallas_kernels.cross_entropy.types import NUM_STATISTICS, Inputs, Results, Static


class _Scratch(NamedTuple):
  slots: Any  # [slots, chunk, LANES] float32
  staged: Any  # [consumers, 2, share, LANES] in the dtype of the gradient, or None
  sums: Any  # [2, 3, warps] float32: largest, sum and ties of each warp, of two positions
  barriers: PipelineBarriers
  exchanged: Any  # barrier: all consumers have stored their sums


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
    sums=plgpu.SMEM((2, len(Sums._fields), G * WARPS), jnp.float32),
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
    self.places = places(self.config.share)
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
      sums, target_logit = self.reduce(n, target)
      self.store_statistics(n, sums, target_logit)
      if self.cta.gradient:
        self.store_gradients(n, sums, target, weight)
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
    z = plgpu.load(source, layout=LAYOUT, optimized=False)
    if not is_last:
      return z
    return jnp.where(self.places < self.static.vocab_size - self.first_column(c), z, LOWEST)

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

  def reduce(self, n, target) -> tuple[Sums, Any]:
    """Sums over all logits of the n-th position, and the logit of its target."""
    first_load = self.cta.first_load(n, 0)

    def compute(c, carry, *, is_last):
      sums, target_logit = carry
      number = first_load + c
      self.pipeline.wait_loaded(number)
      z = self.load(number, c, is_last=is_last)
      target_logit = self.select_target(number, c, target, target_logit)
      if not self.cta.resident:
        self.release(number)
      return add(sums, z), target_logit

    start = no_sums(self.static), jnp.float32(0.0)
    sums, target_logit = self.each_chunk(compute, start)
    return self.exchange(n, sums), target_logit

  def select_target(self, number, c, target, target_logit):
    """The logit of the target if chunk c has it, otherwise `target_logit`."""
    size = self.config.chunk * LANES
    place = target - c * size
    inside = (place >= 0) & (place < size)
    place = jnp.where(inside, place, 0)
    z = self.smem.slots[self.pipeline.slot(number), lax.div(place, LANES), lax.rem(place, LANES)]
    return jnp.where(inside, z, target_logit)

  def exchange(self, n, sums: Sums) -> Sums:
    """Sums over all warps of all consumers, the same numbers for each."""
    of_own = of_warps(sums)
    # Of two positions, because a consumer may be ahead of another that still reads.
    sums_smem = self.smem.sums.at[lax.rem(n, 2)]

    for field, value in enumerate(of_own):
      if value is not None:
        sums_smem.at[field, pl.ds(self.index * WARPS, WARPS)][...] = value
    plgpu.barrier_arrive(self.smem.exchanged)
    plgpu.barrier_wait(self.smem.exchanged)
    return of_all(sums_smem, range(self.config.consumers * WARPS), self.static)

  def store_statistics(self, n, sums: Sums, target_logit) -> None:
    """Stores the statistics of the n-th position, by the first consumer."""
    values = statistics(sums, target_logit)
    target_gmem = self.cta.outs.statistics.at[self.cta.position(n)]
    pl.when(self.index == 0)(lambda: store_unoptimized(target_gmem, values))

  # Pass 2

  def store_gradients(self, n, sums: Sums, target, weight) -> None:
    """Stores the gradient by the logits of the n-th position."""
    cta = self.cta
    first_load = cta.first_load(n, 1)
    position = cta.position(n)
    gradient_by = gradient(self.static, sums, weight)

    def staged_smem(c):
      return self.smem.staged.at[self.index, lax.rem(n * self.num_stores + c, 2)]

    def stage(number, c, is_last):
      z = self.load(number, c, is_last=is_last)
      d = gradient_by(z, lambda: self.places == target - self.first_column(c))
      # All stores but the latest have left SMEM: the buffer of the one before is free.
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)
      staged_smem(c)[...] = d.astype(self.static.dtype)

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

"""Shared by the attention kernels: ranges of visible tokens, the loop over tiles."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.config import CONSUMERS, ROWS, TILE, LoopConfig
from pallas_kernels.attention.types import Range
from pallas_kernels.core.wgmma import (
  COMPILER_PARAMS,
  Backend,
  Ref,
  broadcast_rows,
  iota,
  load_row_vector,
)


class Steps(NamedTuple):
  """Steps [begin, end) of a loop over tiles, of which [inside, outside) need no mask."""

  begin: jax.Array
  end: jax.Array
  inside: jax.Array
  outside: jax.Array


def steps_of(bounds: Range, batch: jax.Array, start: jax.Array, rows: int, tile: int) -> Steps:
  """The steps of the tokens [start, start + rows)."""
  last = start + rows - 1
  begin = lax.div(bounds.first[batch, start], tile)
  end = lax.div(bounds.end[batch, last] + (tile - 1), tile)
  inside = lax.div(bounds.first[batch, last] + (tile - 1), tile)
  outside = lax.div(bounds.end[batch, start], tile)
  return Steps(begin, jnp.maximum(begin, end), inside, outside)


def visible(rows: Range, step: jax.Array, shape: tuple[int, int]) -> jax.Array:
  """Which tokens of a step, along the columns, the tokens along the rows see."""
  column = iota(shape, 1)
  start = step * shape[1]
  first, end = (broadcast_rows(x - start, shape) for x in rows)
  return (column >= first) & (column < end)


def load_range(bounds: Range, batch: jax.Array, start: jax.Array) -> Range:
  """The ranges of the rows of a warpgroup, in registers."""
  return Range(*(load_row_vector(x.at[batch, pl.ds(start, ROWS)]) for x in bounds))


@dataclasses.dataclass(frozen=True)
class Ring:
  """Stages in SMEM through which the producer hands the tiles of steps to the consumers."""

  num_stages: int
  loaded: Any  # barriers by the name of a tile, one per stage
  consumed: Ref

  def slot(self, n: jax.Array) -> jax.Array:
    """The stage of the n-th step of this CTA."""
    return lax.rem(n, self.num_stages)

  def wait(self, name: str, n: jax.Array) -> None:
    """Waits until the copies of a tile for step n have arrived."""
    plgpu.barrier_wait(getattr(self.loaded, name).at[self.slot(n)])

  def release(self, n: jax.Array) -> None:
    """A consumer does not read the stage of step n any more."""
    plgpu.barrier_arrive(self.consumed.at[self.slot(n)])

  def produce(self, count: jax.Array, load: Callable[[jax.Array], None]) -> None:
    """The producer: `load(n)` starts the copies for step n, of `count` steps."""

    def step(n, _):
      reused = n >= self.num_stages
      pl.when(reused)(lambda: plgpu.barrier_wait(self.consumed.at[self.slot(n)]))
      load(n)

    lax.fori_loop(0, count, step, None)
    # Drain: barriers outlive their users.
    drain = lambda n, _: plgpu.barrier_wait(self.consumed.at[self.slot(n)])
    lax.fori_loop(jnp.maximum(count - self.num_stages, 0), count, drain, None)

  def consume[Carry](
    self,
    steps: Steps,
    own: Steps,
    number: Callable[[jax.Array], jax.Array],
    advance: Callable[[jax.Array, Carry], Carry],
    carry: Carry,
  ) -> Carry:
    """A consumer: `advance(step, carry)` for its own of the steps that the CTA goes through.

    Args:
      number: how many steps of this CTA come before a step.
    """

    def skip(step, _):
      n = number(step)
      for name in self.loaded._fields:
        self.wait(name, n)
      self.release(n)

    lax.fori_loop(steps.begin, own.begin, skip, None)
    carry = lax.fori_loop(own.begin, own.end, advance, carry)
    lax.fori_loop(own.end, steps.end, skip, None)
    return carry


class KeyTiles(NamedTuple):
  """Keys and values, or the barriers on which they arrive."""

  k: Any  # [B, S, G, K]; in SMEM [stages, tile, K]
  v: Any  # [B, S, G, V]; in SMEM [stages, tile, V]


def produce_keys(
  ring: Ring, steps: Steps, gmem: KeyTiles, smem: KeyTiles, batch: jax.Array, head: jax.Array
) -> None:
  """The producer of the kernels for queries: the keys and values of all steps."""

  def load(n):
    slot, tile = ring.slot(n), smem.k.shape[1]
    keys = pl.ds((steps.begin + n) * tile, tile)
    for source, target, arrived in zip(gmem, smem, ring.loaded, strict=True):
      plgpu.copy_gmem_to_smem(source.at[batch, keys, head], target.at[slot], arrived.at[slot])

  ring.produce(steps.end - steps.begin, load)


def launch(
  body: Callable[..., None],
  arrays: Any,
  out_type: Any,
  scratch: Any,
  *,
  grid: tuple[int, int, int],
  config: LoopConfig,
  name: str,
  backend: Backend,
) -> Any:
  """Runs `body(warpgroup, arrays_gmem, outs_gmem, scratch)` in every warpgroup of every CTA.

  Warpgroup `CONSUMERS` is the producer. The axes of the grid are "row", "head" and "tile", the last
  of which varies fastest: CTAs that run together read the same keys.
  """

  def of_warpgroup(*refs):
    warpgroup = lax.axis_index("warpgroup")
    produces = warpgroup == CONSUMERS

    @pl.when(produces)
    def _producer():
      plgpu.set_max_registers(config.producer_registers, action="decrease")
      body(None, *refs)

    @pl.when(jnp.logical_not(produces))
    def _consumer():
      plgpu.set_max_registers(config.consumer_registers, action="increase")
      body(warpgroup, *refs)

  (results,) = plgpu.kernel(
    of_warpgroup,
    out_type=[out_type],  # a tuple would be several results
    scratch_types=[scratch],
    grid=grid,
    grid_names=("row", "head", "tile"),
    num_threads=CONSUMERS + 1,
    thread_name="warpgroup",
    interpret=backend.interpret,
    kernel_name=name,
    compiler_params=COMPILER_PARAMS,
  )(arrays)
  return results


def tile_start(number: jax.Array) -> jax.Array:
  """The first token of a CTA's tile."""
  return number * TILE

"""Shared by the attention kernels for Hopper: the loop over tiles."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.config import CONSUMERS, ROWS, TILE, LoopConfig
from pallas_kernels.attention.softmax import Steps, load_range, steps_of
from pallas_kernels.attention.types import Range
from pallas_kernels.core.wgmma import COMPILER_PARAMS, Backend, Ref, smem_tile


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

  def produce(
    self, count: jax.Array, load: Callable[[jax.Array], None], before: jax.Array | int = 0
  ) -> None:
    """The producer: `load(n)` starts the copies for step n, of `count` steps after `before`."""

    def step(n, _):
      reused = n >= self.num_stages
      pl.when(reused)(lambda: plgpu.barrier_wait(self.consumed.at[self.slot(n)]))
      load(n)

    lax.fori_loop(before, before + count, step, None)

  def drain(self, count: jax.Array) -> None:
    """The producer, after all `count` steps: barriers outlive their users."""
    wait = lambda n, _: plgpu.barrier_wait(self.consumed.at[self.slot(n)])
    lax.fori_loop(jnp.maximum(count - self.num_stages, 0), count, wait, None)

  def skip(self, begin: jax.Array, end: jax.Array, number: Callable[[jax.Array], jax.Array]):
    """A consumer: passes steps that only others need."""

    def step(step, _):
      n = number(step)
      for name in self.loaded._fields:
        self.wait(name, n)
      self.release(n)

    lax.fori_loop(begin, end, step, None)

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
    self.skip(steps.begin, own.begin, number)
    carry = lax.fori_loop(own.begin, own.end, advance, carry)
    self.skip(own.end, steps.end, number)
    return carry


class KeyTiles(NamedTuple):
  """Keys and values, or the barriers on which they arrive."""

  k: Any  # [B, S, G, K]; in SMEM [stages, tile, K]
  v: Any  # [B, S, G, V]; in SMEM [stages, tile, V]


class QueryScratch(NamedTuple):
  """SMEM and barriers of the kernels for queries."""

  own: tuple  # [tiles, 128, X] of the CTA's queries
  keys: KeyTiles
  out: Any  # [tiles, 128, V], where outputs have tiles of their own; or None
  lhs: Any
  own_loaded: Any
  loaded: KeyTiles
  consumed: Any

  @classmethod
  def of(
    cls, widths, k, v, config: LoopConfig, backend: Backend, out=None, tiles: int = 1
  ) -> "QueryScratch":
    """For tiles of these widths, and keys and values [B, S, G, X]."""
    stages, tile = config.num_stages, config.tile
    barrier = plgpu.Barrier(num_barriers=stages)
    return cls(
      own=tuple(smem_tile(tiles, TILE, width) for width in widths),
      keys=KeyTiles(*(smem_tile(stages, tile, x.shape[3]) for x in (k, v))),
      out=out,
      lhs=backend.lhs_scratch(CONSUMERS, ROWS, tile),
      own_loaded=plgpu.Barrier(num_arrivals=len(widths), num_barriers=tiles),
      loaded=KeyTiles(barrier, barrier),
      consumed=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
    )


class QueryTiles(NamedTuple):
  """The tiles of queries of a CTA, one after another."""

  total: int  # of the sequence
  most: int  # of a CTA

  @property
  def ctas(self) -> int:
    """How many CTAs a sequence has."""
    return -(-self.total // self.most)

  def of(self, n: jax.Array | int) -> jax.Array:
    """The n-th of this CTA; negative if there is none.

    With causal masks the last have most to do: they come first, and with few of the others.
    """
    place = lax.axis_index("tile")
    if self.most > 1:
      place = n * self.ctas + jnp.where(n & 1 == 0, place, self.ctas - 1 - place)
    return self.total - 1 - place

  def for_each(self, of_tile: Callable[[Any, Any], Any]) -> Any:
    """Calls `of_tile(n, steps before it)`, which returns the steps after it; returns the last."""
    if self.most == 1:
      return of_tile(0, 0)
    count = self.most
    if self.total % self.most:
      count = jnp.where(self.of(self.most - 1) >= 0, self.most, self.most - 1)
    return lax.fori_loop(0, count, of_tile, jnp.int32(0))


class QueryLoop:
  """A tile of 128 queries of a CTA of the kernels for queries, and its loop over their keys.

  Args:
    place: where the tile is in `QueryTiles` and in SMEM.
    before: steps of the CTA before this tile's.
  """

  def __init__(
    self, seen: Range, smem: QueryScratch, config: LoopConfig, tiles: QueryTiles,
    place: jax.Array | int = 0, before: jax.Array | int = 0,
  ):  # fmt: skip
    self.batch, self.head = lax.axis_index("row"), lax.axis_index("head")
    self.start = tile_start(tiles.of(place))
    self.seen, self.smem, self.tile = seen, smem, config.tile
    self.place, self.before = place, before
    self.ring = Ring(config.num_stages, smem.loaded, smem.consumed)
    self.steps = steps_of(seen, self.batch, self.start, TILE, config.tile)

  @property
  def after(self) -> jax.Array:
    """Steps of the CTA up to the end of this tile's."""
    return self.number(self.steps.end)

  def produce(self, own: Sequence[Ref], keys: KeyTiles, group: int) -> None:
    """The producer: the tile's rows of `own` [B, T, H, X], and keys and values of all steps, which
    `group` heads share."""
    tokens = pl.ds(self.start, TILE)
    for source, target in zip(own, self.smem.own, strict=True):
      source = source.at[self.batch, tokens, self.head]
      arrived = self.smem.own_loaded.at[self.place]
      plgpu.copy_gmem_to_smem(source, target.at[self.place], arrived)
    key_head = lax.div(self.head, group)

    def load(n):
      slot = self.ring.slot(n)
      tokens = pl.ds((self.steps.begin + n - self.before) * self.tile, self.tile)
      for source, target, arrived in zip(keys, self.smem.keys, self.ring.loaded, strict=True):
        source = source.at[self.batch, tokens, key_head]
        plgpu.copy_gmem_to_smem(source, target.at[slot], arrived.at[slot])

    self.ring.produce(self.steps.end - self.steps.begin, load, self.before)

  def rows_of(self, warpgroup) -> tuple[jax.Array, Steps, Range]:
    """A consumer's first query, its own steps, and the ranges of its queries."""
    mine = self.start + warpgroup * ROWS
    own = steps_of(self.seen, self.batch, mine, ROWS, self.tile)
    return mine, own, load_range(self.seen, self.batch, mine)

  def own_tiles(self, warpgroup) -> list[Ref]:
    """A consumer's rows of the tiles, once they have arrived."""
    in_tile = pl.ds(warpgroup * ROWS, ROWS)
    plgpu.barrier_wait(self.smem.own_loaded.at[self.place])
    return [x.at[self.place, in_tile] for x in self.smem.own]

  def number(self, step: jax.Array) -> jax.Array:
    """How many steps of this CTA come before a step."""
    return self.before + step - self.steps.begin

  def consume[Carry](self, own: Steps, advance: Callable[[jax.Array, Carry], Carry], carry: Carry):
    """`Ring.consume` of the CTA's steps."""
    return self.ring.consume(self.steps, own, self.number, advance, carry)


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

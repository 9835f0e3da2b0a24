"""Configurations of the attention kernels. Never keyed on a length."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.core import device, tuning

WIDEST_AMPERE = 128  # of heads, in the kernels for every GPU since Ampere
WIDTHS = (64, 128, 192, 256)  # what heads of q and k, and those of v, are padded to
ROWS = 64  # rows of a warpgroup's products
CONSUMERS = 2  # warpgroups of a CTA that compute; one more copies
TILE = CONSUMERS * ROWS  # queries of a CTA; in the kernel for keys, keys


_BARRIERS = 1024  # bytes of SMEM, at most, for barriers
_REDUCTIONS = 2048  # bytes of SMEM for sums that cross warps


class Shape(NamedTuple):
  """Padded sizes, for which a configuration is chosen."""

  key_width: int
  value_width: int
  tiles: int  # of queries, of all heads of all sequences together

  @property
  def shape_class(self) -> str:
    """The key of a device's table."""
    few = "" if self.many_tiles else "-few"
    return f"K{self.key_width}-V{self.value_width}-bfloat16{few}"

  @property
  def many_tiles(self) -> bool:
    """Whether every SM has work for long where a CTA has two tiles."""
    return self.tiles >= 8 * device.current().sm_count


@dataclasses.dataclass(frozen=True)
class LoopConfig:
  """How a kernel goes through the other side's tokens.

  Attributes:
    tile: tokens per step: keys in the kernels for queries, queries in that for keys.
    num_stages: steps whose inputs are in SMEM.
    producer_registers: registers of a thread that copies.
    consumer_registers: registers of a thread that computes.
  """

  tile: int
  num_stages: int = 2
  producer_registers: int = 24
  consumer_registers: int = 240

  def __post_init__(self):
    if self.tile not in (64, 128):
      raise ValueError(
        f"tile={self.tile} must be 64 or 128: what WGMMA sums over, and what TMA copies."
      )
    if self.num_stages < 1:
      raise ValueError(f"num_stages={self.num_stages} must be at least 1.")


@dataclasses.dataclass(frozen=True)
class ForwardConfig(LoopConfig):
  """How the kernel for outputs goes through the keys.

  Attributes:
    query_tiles: tiles of queries that a CTA has one after another: the copies for one overlap with
      the work on the one before.
  """

  query_tiles: int = 1

  def __post_init__(self):
    super().__post_init__()
    if self.query_tiles < 1:
      raise ValueError(f"query_tiles={self.query_tiles} must be at least 1.")


@dataclasses.dataclass(frozen=True)
class Config:
  """The three kernels: outputs, gradients of queries, gradients of keys and values.

  Attributes:
    separate_keys: gradients of keys and those of values are computed by a kernel each.
  """

  forward: ForwardConfig
  query_gradient: LoopConfig
  key_gradient: LoopConfig
  separate_keys: bool = False

  def smem(self, shape: Shape) -> dict[str, int]:
    """Bytes of SMEM per CTA by kernel."""
    K, V, _ = shape
    bf16, f32 = 2, 4
    row = bf16 * (K + V)
    loop = lambda config: config.num_stages * config.tile
    queries = self.forward.query_tiles * TILE * bf16 * (K if K == V else K + V)
    needed = {
      "forward": queries + loop(self.forward) * row,
      "query_gradient": (TILE + loop(self.query_gradient)) * row,
      "key_gradient": TILE * row + loop(self.key_gradient) * (row + 2 * f32),
    }
    return {name: size + _BARRIERS + _REDUCTIONS for name, size in needed.items()}

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the configuration does not fit the shape or the device."""
    tuning.check_smem("attention", self.smem(shape))


@dataclasses.dataclass(frozen=True)
class AmpereConfig:
  """The kernels for every GPU since Ampere: nothing is chosen yet. A CTA has tiles of 64 tokens."""

  def smem(self, shape: Shape) -> dict[str, int]:
    """Bytes of SMEM per CTA by kernel."""
    K, V, _ = shape
    needed = {
      "outputs": K + max(K, V),
      "query_gradient": K + V + max(K, V),
      "key_gradient": 2 * (K + V),
    }
    return {name: 2 * ROWS * (width + ROWS) + _REDUCTIONS for name, width in needed.items()}

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the kernels do not fit the device."""
    tuning.check_smem("attention", self.smem(shape))


def default(shape: Shape) -> Config:
  """Hopper's configuration for widths that are in `WIDTHS`, on the current device."""
  wide = max(shape.key_width, shape.value_width) > 128
  config = Config(
    forward=ForwardConfig(
      tile=64, num_stages=2 if wide else 4, query_tiles=1 if wide or not shape.many_tiles else 2
    ),
    query_gradient=LoopConfig(tile=64, num_stages=1 if wide else 3),
    key_gradient=LoopConfig(tile=64, num_stages=1 if wide else 2),
    separate_keys=wide,
  )
  return tuning.tuned("attention", shape.shape_class, config)


def padded_width(width: int) -> int:
  """The first of `WIDTHS` that is at least `width`."""
  return next(size for size in WIDTHS if size >= width)


def padded_length(length: int) -> int:
  """Whole tiles."""
  return -(-length // TILE) * TILE

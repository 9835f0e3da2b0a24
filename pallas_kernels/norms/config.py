"""Configurations of the norms' kernels."""

import dataclasses
import math
from typing import NamedTuple

from pallas_kernels.core import device, tuning

LANES = 32
WARPS = 4  # per CTA
SHARED_FROM = 1024  # channels; shorter rows are of one warp each
MAX_CHANNELS = 4096  # more would not fit into registers
_REDUCTIONS = 2048  # bytes of SMEM for sums that cross warps


@dataclasses.dataclass(frozen=True)
class KernelConfig:
  """How a kernel runs."""

  vector: int  # adjacent channels per thread
  warps_per_row: int
  tiles: int  # that are loaded together
  ctas_per_sm: int

  def __post_init__(self):
    if self.vector not in (1, 2, 4, 8):
      raise ValueError(f"vector={self.vector} must be 1, 2, 4 or 8: at most 16 bytes per load.")
    if self.warps_per_row not in (1, WARPS):
      raise ValueError(f"warps_per_row={self.warps_per_row} must be 1 or {WARPS}.")
    if self.tiles < 1 or self.ctas_per_sm < 1:
      raise ValueError(f"tiles={self.tiles} and ctas_per_sm={self.ctas_per_sm} must be positive.")

  @property
  def tile_rows(self) -> int:
    """Rows of a tile."""
    return WARPS // self.warps_per_row

  @property
  def group_rows(self) -> int:
    """Rows that a CTA computes at a time."""
    return self.tile_rows * self.tiles


def takes(channels: int) -> bool:
  """Whether there is a configuration for rows of this many channels."""
  lanes = LANES if channels < SHARED_FROM else LANES * WARPS
  return channels % lanes == 0 and 0 < channels <= MAX_CHANNELS


class Shape(NamedTuple):
  """Sizes for which a configuration is chosen."""

  channels: int  # that `takes` accepts
  rows: int

  @property
  def shape_class(self) -> str:
    """The key of a device's table."""
    return f"D{self.channels}"


@dataclasses.dataclass(frozen=True)
class Config:
  """Both kernels."""

  forward: KernelConfig
  backward: KernelConfig

  def smem(self, shape: Shape) -> dict[str, int]:
    """Bytes of SMEM per CTA by kernel."""
    del shape
    return {"forward": _REDUCTIONS, "backward": _REDUCTIONS}

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the configuration does not fit the shape."""
    for name in ("forward", "backward"):
      config = getattr(self, name)
      lanes = LANES * config.warps_per_row * config.vector
      if shape.channels % lanes:
        raise ValueError(
          f"norms: {name}.vector={config.vector} for warps_per_row={config.warps_per_row} needs a "
          f"multiple of {lanes} channels, and there are {shape.channels}."
        )
      if shape.rows % config.group_rows:
        raise ValueError(
          f"norms: {name}.tiles={config.tiles} are {config.group_rows} rows, which must divide "
          f"{shape.rows}."
        )


def default(shape: Shape) -> Config:
  """The configuration for a shape on the current device. Measured on an H200."""
  vector, warps_per_row, numbers = _row(shape.channels)
  small = 4 if numbers == 8 else 8
  forward = (1, 8) if numbers > 8 else (4, small)
  backward = (1, 8) if numbers > 8 else (4, 4) if warps_per_row > 1 else (2, 8)
  of_row = lambda tiles, ctas_per_sm: KernelConfig(vector, warps_per_row, tiles, ctas_per_sm)
  config = tuning.tuned("norms", shape.shape_class, Config(of_row(*forward), of_row(*backward)))
  rows = shape.rows
  return Config(_dividing(config.forward, rows), _dividing(config.backward, rows))


def _row(channels):
  """(Adjacent channels per thread, warps per row, numbers of a row per thread)."""
  warps_per_row = 1 if channels < SHARED_FROM else WARPS
  lanes = LANES * warps_per_row
  vector = next(v for v in (8, 4, 2, 1) if channels % (lanes * v) == 0)
  return vector, warps_per_row, channels // lanes


def _dividing(config, rows):
  """The same with fewer tiles at a time, so that they divide all rows."""
  tiles = config.tiles
  while rows % (tiles * config.tile_rows):
    tiles //= 2
  return dataclasses.replace(config, tiles=tiles)


def grid_size(config: KernelConfig, rows: int, period: int = 1) -> int:
  """CTAs for a number of rows, a multiple of `config.group_rows` and of `period`.

  All of them together process whole periods of rows at a time.
  """
  ctas = min(config.ctas_per_sm * device.current().sm_count, rows // config.group_rows)
  step = period // math.gcd(period, config.group_rows)
  return max(ctas // step, 1) * step

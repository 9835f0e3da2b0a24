"""Configurations of the delta rule's kernels for Hopper. Never keyed on a length."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.core import tuning
from pallas_kernels.core.wgmma import TILE_WIDTH

KEY_WIDTHS = (64, 128)  # what q and k are padded to
VALUE_WIDTHS = (64, 128)  # what v is padded to
CHUNK = 64  # tokens, unless a configuration says otherwise
NARROWEST = 32  # narrower heads are padded more than twofold
_BARRIERS = 1024  # bytes of SMEM, at most, for barriers
_REDUCTIONS = 2048  # bytes of SMEM for sums that cross warps
NUM_ROWS = 5  # of a chunk's table


class Shape(NamedTuple):
  """Padded sizes, for which a configuration is chosen."""

  key_width: int
  value_width: int
  separate_erase_key: bool  # whether the erase key is one more input

  @property
  def shape_class(self) -> str:
    """The key of a device's table."""
    erase = "-erase" if self.separate_erase_key else ""
    return f"K{self.key_width}-V{self.value_width}-bfloat16{erase}"


@dataclasses.dataclass(frozen=True)
class RecurrenceConfig:
  """How the recurrence along the chunks runs.

  Attributes:
    value_tile: value columns per CTA.
    cluster: CTAs of neighboring columns that get their common inputs by one multicast copy.
    num_stages: chunks whose inputs are in SMEM.
    num_slots: chunks whose results are in SMEM.
  """

  value_tile: int
  cluster: int
  num_stages: int
  num_slots: int

  def __post_init__(self):
    if self.value_tile not in (32, 64):
      raise ValueError(
        f"value_tile={self.value_tile} must be 32 or 64: one swizzle of bfloat16 operands."
      )
    for name in ("cluster", "num_stages"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
    if self.num_slots < 2:
      raise ValueError(
        f"num_slots={self.num_slots} must be at least 2: one is stored while the next is computed."
      )
    if VALUE_WIDTHS[0] % (self.value_tile * self.cluster):
      raise ValueError(
        f"value_tile={self.value_tile} times cluster={self.cluster} must divide the narrowest "
        f"values, V={VALUE_WIDTHS[0]}."
      )


@dataclasses.dataclass(frozen=True)
class Config:
  """All kernels of the delta rule over many tokens.

  The kernels of chunk systems, and of the gradients of queries, keys and values, have one CTA per
  chunk and nothing else to choose.

  Attributes:
    forward: the recurrence with the outputs.
    reverse: the recurrence of the cotangents.
    chunk: tokens of a chunk.
  """

  forward: RecurrenceConfig
  reverse: RecurrenceConfig
  chunk: int = CHUNK

  def __post_init__(self):
    if self.chunk != CHUNK:
      raise ValueError(f"chunk={self.chunk} must be {CHUNK}: the rows of one WGMMA.")

  def smem(self, shape: Shape) -> dict[str, int]:
    """Bytes of SMEM per CTA by kernel, for the variant of each that needs most."""
    C, K, V = self.chunk, shape.key_width, shape.value_width
    keys = 2 + shape.separate_erase_key
    bf16, f32 = 2, 4
    pairs, table = bf16 * C * C, f32 * NUM_ROWS * C
    needed = {}
    for name, config in (("forward", self.forward), ("reverse", self.reverse)):
      tile = bf16 * C * config.value_tile
      stage = bf16 * keys * C * K + 2 * pairs + tile + table
      slot = bf16 * K * config.value_tile + (2 if name == "forward" else 1) * tile
      work = (2 if name == "forward" else 3) * tile
      needed[name] = config.num_stages * stage + config.num_slots * slot + work + _REDUCTIONS
    # Keys, outputs and corrections, then a block of the state; dk also adds that of the erase key.
    gradient = bf16 * (keys * C * K + 3 * C * V + TILE_WIDTH * V) + table + _REDUCTIONS
    needed["query_gradient"] = gradient
    needed["key_value_gradient"] = gradient + bf16 * C * K * (not shape.separate_erase_key)
    return {name: size + _BARRIERS for name, size in needed.items()}

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the configuration does not fit the shape or the device."""
    tuning.check_smem("delta_rule", self.smem(shape))


def default(shape: Shape) -> Config:
  """The configuration for a shape on the current device.

  Wider tiles were slower at 32 heads, for too few CTAs run.
  """
  tiles = {"value_tile": 32, "cluster": 2, "num_slots": 3}
  config = Config(
    forward=RecurrenceConfig(**tiles, num_stages=2 if shape.separate_erase_key else 3),
    reverse=RecurrenceConfig(**tiles, num_stages=2),
  )
  return tuning.tuned("delta_rule", shape.shape_class, config)


def preferred(key_width: int, value_width: int) -> bool:
  """Whether the chunked kernels are faster than XLA's form, where they can run."""
  return min(key_width, value_width) >= NARROWEST

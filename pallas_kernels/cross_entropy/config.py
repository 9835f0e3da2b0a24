"""Configurations of the cross-entropy kernels."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.core import device, tuning

LANES = 128  # columns per row of a chunk: the size of the vocabulary is a multiple
TILE = 4  # rows of a chunk that a consumer reduces together, one per warp
_RESERVED = 2 * 1024  # bytes of SMEM for sums and barriers


class Shape(NamedTuple):
  """Sizes for which a configuration is chosen."""

  gradient_bytes: int  # of a number of the gradient; 0: there is none

  @property
  def shape_class(self) -> str:
    """The key of a device's table."""
    return f"gradient{8 * self.gradient_bytes}bit"


@dataclasses.dataclass(frozen=True)
class KernelConfig:
  """How the kernel for Hopper runs."""

  slots: int  # chunks of logits in SMEM
  chunk: int = 32  # rows of LANES logits per copy
  consumers: int = 2  # warpgroups that share each chunk

  def __post_init__(self):
    if self.chunk % (TILE * self.consumers) or not 0 < self.chunk <= 256:
      raise ValueError(
        f"chunk={self.chunk} must be a multiple of {TILE} rows for each of "
        f"consumers={self.consumers}, up to 256, the limit of a copy."
      )
    if self.slots < 2:
      raise ValueError(f"slots={self.slots} must be at least 2: one arrives while one is read.")

  @property
  def share(self) -> int:
    """Rows of a chunk per consumer."""
    return self.chunk // self.consumers

  def num_chunks(self, columns: int) -> int:
    """Chunks per position; the last one may be shorter."""
    return -(-columns // (self.chunk * LANES))

  def resident(self, columns: int) -> bool:
    """Whether all logits of a position fit in SMEM, so that they are loaded once."""
    return self.num_chunks(columns) <= self.slots

  def smem(self, shape: Shape) -> dict[str, int]:
    """Bytes of SMEM per CTA."""
    row = self.chunk * LANES
    return {"cross_entropy": row * (4 * self.slots + 2 * shape.gradient_bytes) + _RESERVED}

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the configuration does not fit the shape or the device."""
    tuning.check_smem("cross_entropy", self.smem(shape))


@dataclasses.dataclass(frozen=True)
class AmpereConfig:
  """How the kernel for every GPU since Ampere runs: no SMEM but for the sums of its warps."""

  chunk: int = 32  # rows of LANES logits that are in registers

  def __post_init__(self):
    if self.chunk % TILE or self.chunk <= 0:
      raise ValueError(f"chunk={self.chunk} must be a multiple of {TILE} rows.")

  def rows(self, rows: int) -> int:
    """Rows per chunk of a position that has so many, at least TILE."""
    return min(self.chunk, rows // TILE * TILE)

  def smem(self, shape: Shape) -> dict[str, int]:
    """Bytes of SMEM per CTA."""
    del shape
    return {"cross_entropy": _RESERVED}

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the configuration does not fit the shape or the device."""
    tuning.check_smem("cross_entropy", self.smem(shape))


def default(shape: Shape) -> KernelConfig:
  """As many slots as fit in SMEM next to the staged gradients, on the current device.

  13 for bfloat16 on Hopper: vocabularies of up to 53,248 are loaded once.
  """
  chunk = 32
  # Each consumer has two buffers for its share: one is written while the other leaves.
  staged = 2 * chunk * LANES * shape.gradient_bytes
  slots = (device.current().smem - _RESERVED - staged) // (4 * chunk * LANES)
  return tuning.tuned("cross_entropy", shape.shape_class, KernelConfig(slots, chunk))

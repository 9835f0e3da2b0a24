"""Tuning configuration of the kernels: per device, never keyed on the length of the sequence."""

import dataclasses

from pallas_kernels.core import device
from pallas_kernels.core.wgmma import CHUNK, TILE_WIDTH

KEY_WIDTHS = (64, 128)  # what q and k are padded to
VALUE_WIDTHS = (64, 128, 256)  # what v is padded to
NARROWEST = 32  # narrower heads are padded more than twofold, which has not been measured


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
  """How the state pipeline runs.

  Attributes:
    value_tile: value columns per CTA; one consumer warpgroup has 64 of them.
    num_stages: chunks whose inputs are in SMEM.
  """

  value_tile: int
  num_stages: int

  def __post_init__(self):
    if self.value_tile not in (64, 128):
      raise ValueError(
        f"value_tile={self.value_tile} must be 64 or 128: a consumer warpgroup has {TILE_WIDTH} "
        "columns, and the registers of an SM are enough for two of them and the producer."
      )
    if self.num_stages < 1:
      raise ValueError(f"num_stages={self.num_stages} must be at least 1.")


def pipeline_config(value_width: int) -> PipelineConfig:
  """The tuned configuration for values that are padded to one of `VALUE_WIDTHS`."""
  return PipelineConfig(value_tile=min(value_width, 128), num_stages=3)


def padded_width(width: int, widths: tuple[int, ...]) -> int:
  """The first of `widths` that is at least `width`."""
  return next(size for size in widths if size >= width)


def preferred(key_width: int, value_width: int) -> bool:
  """Whether the chunked kernels are faster than XLA's form, where they can run.

  Measured on an H200 at B8 T2048 H16 K128 V128, where they are for every decay.
  """
  return min(key_width, value_width) >= NARROWEST


def num_splits(batch: int, heads: int, value_width: int, length: int) -> int:
  """The number of splits into which a sequence is cut so that every SM has work."""
  ctas = batch * heads * (value_width // pipeline_config(value_width).value_tile)
  return device.current().num_splits(ctas, padded_length(length, 1), 4 * CHUNK)


def padded_length(length: int, num_splits: int) -> int:
  """The number of tokens that the kernels run: equally many whole chunks in every split."""
  block = CHUNK * num_splits
  return -(-length // block) * block


def chunks_per_cta(chunks: int) -> int:
  """Chunks that a CTA of the intra-chunk kernel processes, one after the other.

  More than one only if there remain three CTAs for each of the two that an SM holds.
  """
  return next(n for n in (4, 2, 1) if n == 1 or chunks >= n * 3 * 2 * device.current().sm_count)


def heads_per_cta(group: int, ctas: int) -> int:
  """Heads of a group that a CTA of the backward pass processes, one after the other.

  It adds up their gradients of queries or keys, so `group / heads_per_cta` sums of a group remain.
  Of the divisors of `group`, the one that takes the least time on SMs that run two CTAs each, if a
  CTA takes the same time for each head, and once more to begin and to end.

  Args:
    group: heads that share queries and keys.
    ctas: CTAs if each had one head.
  """
  rounds = lambda n: -(-ctas // (n * 2 * device.current().sm_count))
  divisors = (n for n in range(group, 0, -1) if group % n == 0)
  return min(divisors, key=lambda n: rounds(n) * (n + 1))


def head_stages(key_width: int, value_width: int, columns: int) -> int:
  """Heads whose tiles are in the SMEM of a CTA with several: two if there is room in half an SM.

  Args:
    columns: of all tiles [C, X] together that are there once.
  """
  head = (key_width + 2 * CHUNK) * value_width
  reserved = 3 * 1024  # sums that cross warps, and barriers
  room = device.current().smem_of_each(2) - reserved
  return 2 if 2 * (2 * head + CHUNK * columns) <= room else 1

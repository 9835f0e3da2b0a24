"""Tile sizes and stages of the attention kernels: per device, never keyed on a length."""

import dataclasses

WIDTHS = (64, 128, 256)  # what heads of q and k, and those of v, are padded to
ROWS = 64  # rows of a consumer warpgroup: those of one WGMMA
CONSUMERS = 2  # warpgroups of a CTA that compute; one more copies
TILE = CONSUMERS * ROWS  # queries of a CTA; in the kernel for keys, keys


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
class AttentionConfig:
  """The three kernels: outputs, gradients of queries, gradients of keys and values.

  Attributes:
    separate_keys: gradients of keys and those of values are computed by a kernel each.
  """

  forward: LoopConfig
  query_gradient: LoopConfig
  key_gradient: LoopConfig
  separate_keys: bool = False


def attention_config(key_width: int, value_width: int) -> AttentionConfig:
  """The configuration for widths that are in `WIDTHS`."""
  wide = max(key_width, value_width) > 128
  return AttentionConfig(
    forward=LoopConfig(tile=64, num_stages=2 if wide else 3),
    query_gradient=LoopConfig(tile=64, num_stages=1 if wide else 3),
    key_gradient=LoopConfig(tile=64, num_stages=1 if wide else 2),
    separate_keys=wide,
  )


def padded_width(width: int) -> int:
  """The first of `WIDTHS` that is at least `width`."""
  return next(size for size in WIDTHS if size >= width)


def padded_length(length: int) -> int:
  """Whole tiles."""
  return -(-length // TILE) * TILE

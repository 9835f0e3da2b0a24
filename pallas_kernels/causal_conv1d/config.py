"""Tile sizes of the causal convolution's kernels.

Nothing here depends on the length of the sequence but the number of splits.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.core import device

THREADS = 128  # per CTA
MAX_WIDTH = 4  # taps of a convolution: each thread keeps them in registers
MAX_CONVOLUTIONS = 6  # of one input
_MIN_SPLIT = 32  # tokens


@dataclasses.dataclass(frozen=True)
class KernelConfig:
  """Tile sizes of one kernel."""

  vector: int  # adjacent channels per thread
  group: int  # tokens that are loaded together
  ctas_per_sm: int  # where the sequence is long enough

  def __post_init__(self):
    if self.vector not in (1, 2, 4, 8):
      raise ValueError(f"vector={self.vector} must be 1, 2, 4 or 8: at most 16 bytes per load.")
    if not 1 <= self.group <= 31:
      raise ValueError(f"group={self.group} must be 1 to 31: its flags are bits of an int32.")
    if self.ctas_per_sm < 1:
      raise ValueError(f"ctas_per_sm={self.ctas_per_sm} must be positive.")

  @property
  def channels(self) -> int:
    """Channels per CTA."""
    return THREADS * self.vector


class _Configs(NamedTuple):
  """Of one kernel. Measured on an H200."""

  one: dict[int, KernelConfig]  # by the bytes of a number
  several: KernelConfig  # convolutions of one input: more numbers per channel in registers
  with_offsets: dict[int, KernelConfig]  # likewise, by the bytes of an offset

  def of(
    self, channels: int, dtype: Any, convolutions: int = 1, offsets: Any = None
  ) -> KernelConfig:
    """For a multiple of 128 channels; `offsets` is their dtype, or None."""
    if offsets is not None:
      best = self.with_offsets[jnp.dtype(offsets).itemsize]
    else:
      best = self.one[jnp.dtype(dtype).itemsize] if convolutions == 1 else self.several
    vector = best.vector  # as many CTAs of fewer channels, so that they divide all channels
    while channels % (THREADS * vector):
      vector //= 2
    ctas_per_sm = best.ctas_per_sm * best.vector // vector
    return dataclasses.replace(best, vector=vector, ctas_per_sm=ctas_per_sm)


# With offsets a group of five convolutions has 6 numbers per token and channel forward and 11
# backward, twice, in registers.
forward_config = _Configs(
  one={2: KernelConfig(2, 4, 8), 4: KernelConfig(2, 4, 8)},
  several=KernelConfig(2, 4, 8),
  with_offsets={2: KernelConfig(2, 4, 4), 4: KernelConfig(2, 2, 4)},
).of
backward_config = _Configs(
  one={2: KernelConfig(4, 8, 2), 4: KernelConfig(2, 8, 4)},
  several=KernelConfig(2, 4, 4),
  with_offsets={2: KernelConfig(2, 4, 2), 4: KernelConfig(2, 2, 2)},
).of


def split_length(config: KernelConfig, batch: int, channels: int, length: int) -> int:
  """Tokens per split, whole groups, so that every SM has work."""
  ctas = batch * (channels // config.channels)
  number = min(config.ctas_per_sm * device.current().sm_count // ctas, length // _MIN_SPLIT)
  tokens = -(-length // max(number, 1))
  return -(-tokens // config.group) * config.group

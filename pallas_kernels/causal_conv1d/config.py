"""Configurations of the causal convolution's kernels.

Nothing here depends on the length of the sequence but the number of splits.
"""

import dataclasses
from typing import NamedTuple

from pallas_kernels.core import device, tuning

THREADS = 128  # per CTA
MAX_WIDTH = 4  # taps of a convolution: each thread keeps them in registers
MAX_CONVOLUTIONS = 6  # of one input
_MIN_SPLIT = 32  # tokens


@dataclasses.dataclass(frozen=True)
class KernelConfig:
  """How a kernel runs. It has no SMEM."""

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


class Shape(NamedTuple):
  """Sizes for which a configuration is chosen; bytes are those of a number."""

  channels: int  # a multiple of 128
  bytes_x: int
  convolutions: int  # of one input
  bytes_offset: int  # 0: there are none
  documents: bool = False

  @property
  def shape_class(self) -> str:
    """The key of a device's table."""
    offsets = f"-offsets{8 * self.bytes_offset}bit" if self.bytes_offset else ""
    documents = "-documents" if self.documents else ""
    return f"{8 * self.bytes_x}bit-S{self.convolutions}{offsets}{documents}"


@dataclasses.dataclass(frozen=True)
class Config:
  """Both kernels."""

  forward: KernelConfig
  backward: KernelConfig

  def smem(self, shape: Shape) -> dict[str, int]:
    """Bytes of SMEM per CTA by kernel."""
    del shape
    return {"forward": 0, "backward": 0}

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the configuration does not fit the shape."""
    for name in ("forward", "backward"):
      config = getattr(self, name)
      if shape.channels % config.channels:
        raise ValueError(
          f"causal_conv1d: {name}.vector={config.vector} is {config.channels} channels per CTA, "
          f"which must divide D={shape.channels}."
        )


def default(shape: Shape) -> Config:
  """The configuration for a shape on the current device. Measured on an H200."""
  if shape.bytes_offset:
    # A group of five convolutions has 6 numbers per token and channel forward and 11 backward,
    # twice, in registers.
    group = 4 if shape.bytes_offset == 2 else 2
    forward, backward = KernelConfig(2, group, 4), KernelConfig(2, group, 2)
  elif shape.convolutions > 1:
    forward, backward = KernelConfig(2, 4, 8), KernelConfig(2, 4, 4)
  else:
    # With documents eight CTAs per SM take a quarter longer than seven.
    forward = KernelConfig(2, 4, 7 if shape.documents else 8)
    backward = KernelConfig(4, 8, 2) if shape.bytes_x == 2 else KernelConfig(2, 8, 4)
  config = tuning.tuned("causal_conv1d", shape.shape_class, Config(forward, backward))
  return Config(_dividing(config.forward, shape), _dividing(config.backward, shape))


def _dividing(config, shape):
  """The same with as many CTAs of fewer channels, so that they divide all channels."""
  vector = config.vector
  while shape.channels % (THREADS * vector):
    vector //= 2
  ctas_per_sm = config.ctas_per_sm * config.vector // vector
  return dataclasses.replace(config, vector=vector, ctas_per_sm=ctas_per_sm)


def split_length(config: KernelConfig, batch: int, channels: int, length: int) -> int:
  """Tokens per split, whole groups, so that every SM has work."""
  ctas = batch * (channels // config.channels)
  number = min(config.ctas_per_sm * device.current().sm_count // ctas, length // _MIN_SPLIT)
  tokens = -(-length // max(number, 1))
  return -(-tokens // config.group) * config.group

"""Configurations of the scans with N states per channel. Never keyed on a length."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.core import device, tuning

STATE_WIDTHS = (8, 16)  # states per channel that a kernel works on; more are cut into groups
CHANNELS = 128  # the number of channels is padded to a multiple
CHUNK = 16  # the number of tokens is padded to a multiple: tokens between stored states
THREADS = 128  # per CTA
VECTOR = 4  # states of a channel that are adjacent in a thread
_MIN_SPLIT = 128  # tokens
_MIN_CHANNELS = 64  # fewer are padded more than twofold
_BACKWARD_CTAS_PER_SM = 2
_BARRIERS = 1024  # bytes of SMEM, at most, for barriers


@dataclasses.dataclass(frozen=True)
class KernelConfig:
  """How a kernel over many tokens runs."""

  lanes: int  # threads that share the states of a channel
  num_tiles: int  # tiles of THREADS / lanes channels per CTA
  chunk: int = CHUNK  # tokens per copy to SMEM
  stages: int = 2  # chunks in SMEM: one is computed while the others are copied
  unroll: int = 2  # tokens per iteration of the forward loop
  tokens_per_sum: int = 2  # in the backward kernel, tokens whose sums over channels share a barrier

  def __post_init__(self):
    if self.lanes not in (1, 2, 4):
      raise ValueError(f"lanes={self.lanes} must be 1, 2 or 4: threads of a warp share a channel.")
    if self.chunk != CHUNK:
      raise ValueError(f"chunk={self.chunk} must be {CHUNK}, the padding of the tokens.")
    for name in ("unroll", "tokens_per_sum"):
      if self.chunk % getattr(self, name):
        raise ValueError(f"{name}={getattr(self, name)} must divide chunk={self.chunk}.")

  @property
  def rows(self) -> int:
    """Channels of a tile."""
    return THREADS // self.lanes

  @property
  def channels(self) -> int:
    """Channels per CTA."""
    return self.rows * self.num_tiles


def state_width(N: int) -> int:
  """The number of states that N are padded to, or cut into groups of."""
  return next((width for width in STATE_WIDTHS if width >= N), STATE_WIDTHS[-1])


def preferred(channels: int) -> bool:
  """Whether the kernels are faster than XLA's form, where they can run."""
  return channels >= _MIN_CHANNELS


def num_splits(B: int, T: int, D: int, min_splits: int) -> int:
  """Number of splits of a sequence that gives every SM work; 1 or at least `min_splits`."""
  ctas = B * -(-D // CHANNELS)
  number = device.current().num_splits(ctas, T, _MIN_SPLIT, _BACKWARD_CTAS_PER_SM)
  return number if number >= min_splits else 1


class Shape(NamedTuple):
  """Padded sizes, for which a configuration is chosen."""

  scan: str  # the recurrence's name
  channels: int
  states: int
  num_sums: int  # sums over channels per token and state in the backward pass
  bytes_x: int  # of a number
  bytes_rate: int

  @property
  def shape_class(self) -> str:
    """The key of a device's table."""
    dtypes = f"{8 * self.bytes_x}bit-rates{8 * self.bytes_rate}bit"
    pairs = "-pairs" if self.channels % (2 * CHANNELS) == 0 else ""
    return f"{self.scan}-N{self.states}-{dtypes}{pairs}"


@dataclasses.dataclass(frozen=True)
class Config:
  """Both kernels."""

  forward: KernelConfig
  backward: KernelConfig

  def smem(self, shape: Shape) -> dict[str, int]:
    """Bytes of SMEM per CTA by kernel, for the variant of each that needs most."""
    N, wide = shape.states, shape.bytes_rate > shape.bytes_x
    f32 = 4
    needed = {}
    for name, config in (("forward", self.forward), ("backward", self.backward)):
      C, width = config.chunk, config.channels
      own = C * width * (shape.bytes_x + shape.bytes_rate)
      # Keys, in the Longhorn scan also sums of other squares; flags and norms.
      shared = f32 * C * ((3 if shape.scan == "longhorn_scan" else 2) * N + 2)
      if name == "forward":
        needed[name] = config.stages * (own + shared) + 2 * C * width * shape.bytes_x
        continue
      entering = 0 if wide else width * N * shape.bytes_x
      stage = own + C * width * shape.bytes_x + shared + entering
      states = (C - 2) * width * N * shape.bytes_x
      sums = f32 * config.tokens_per_sum * shape.num_sums * config.rows * N
      results = C * width * (shape.bytes_x + (0 if wide else shape.bytes_rate))
      needed[name] = config.stages * stage + states + sums + results
    return {name: size + _BARRIERS for name, size in needed.items()}

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the configuration does not fit the shape or the device."""
    for name in ("forward", "backward"):
      config = getattr(self, name)
      if shape.channels % config.channels:
        raise ValueError(
          f"{shape.scan}: {name}: lanes={config.lanes} and num_tiles={config.num_tiles} are "
          f"{config.channels} channels per CTA, which must divide D={shape.channels}."
        )
      if shape.states % (VECTOR * config.lanes):
        raise ValueError(
          f"{shape.scan}: {name}.lanes={config.lanes} threads of {VECTOR} states each must divide "
          f"N={shape.states}."
        )
    tuning.check_smem(shape.scan, self.smem(shape))


def default(shape: Shape) -> Config:
  """The configuration for a shape on the current device.

  Forward, one thread per channel, or per two channels in place of two CTAs. Exponentials bound the
  selective scan, loads of keys from SMEM the Longhorn scan: there two channels share them. Measured
  on an H200. Backward, `VECTOR` adjacent states per thread.
  """
  pair = shape.scan == "longhorn_scan" and shape.channels % (2 * CHANNELS) == 0
  lanes = shape.states // VECTOR
  # As many tokens at once as SMEM has room for.
  tokens_per_sum = 2 if shape.num_sums <= 2 else 1
  # Since Ampere the next chunk waits in registers.
  gpu = device.current()
  stages = 1 if gpu.architecture == device.AMPERE else 2
  for num_tiles in (lanes, lanes // 2, 1):
    config = Config(
      KernelConfig(lanes=1, num_tiles=2 if pair else 1, stages=stages),
      KernelConfig(lanes, num_tiles, stages=stages, tokens_per_sum=tokens_per_sum),
    )
    if max(config.smem(shape).values()) <= gpu.smem:
      break
  return tuning.tuned("channel_states", shape.shape_class, config)

"""Tile sizes of the scans with N states per channel. Never keyed on the length of the sequence."""

import dataclasses

from pallas_kernels.core import device

STATE_WIDTHS = (8, 16)  # states per channel that a kernel works on; more are cut into groups
CHANNELS = 128  # the number of channels is padded to a multiple
CHUNK = 16  # the number of tokens is padded to a multiple: tokens between stored states
THREADS = 128  # per CTA
VECTOR = 4  # states of a channel that are adjacent in a thread
_MIN_SPLIT = 128  # tokens
_MIN_CHANNELS = 64  # fewer are padded more than twofold
_BACKWARD_CTAS_PER_SM = 2


@dataclasses.dataclass(frozen=True)
class KernelConfig:
  """Tile sizes of a kernel over many tokens."""

  lanes: int  # threads that share the states of a channel
  num_tiles: int  # tiles of THREADS / lanes channels per CTA
  chunk: int = CHUNK  # tokens per copy to SMEM
  stages: int = 2  # chunks in SMEM: one is computed while the others are copied
  unroll: int = 2  # tokens per iteration of the forward loop
  tokens_per_sum: int = 2  # in the backward kernel, tokens whose sums over channels share a barrier

  def __post_init__(self):
    if self.lanes not in (1, 2, 4):
      raise ValueError(f"lanes={self.lanes} must be 1, 2 or 4: threads of a warp share a channel.")
    if CHUNK % self.chunk:
      raise ValueError(f"chunk={self.chunk} must divide {CHUNK}, the padding of the tokens.")
    for name in ("unroll", "tokens_per_sum"):
      if self.chunk % getattr(self, name):
        raise ValueError(f"{name}={getattr(self, name)} must divide chunk={self.chunk}.")


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


def forward_config(name: str, D: int) -> KernelConfig:
  """One thread per channel, or per two channels in place of two CTAs.

  Exponentials bound the selective scan, loads of keys from SMEM the Longhorn scan: there two
  channels share them. Measured on an H200.
  """
  pair = name == "longhorn_scan" and D % (2 * CHANNELS) == 0
  return KernelConfig(lanes=1, num_tiles=2 if pair else 1)


def backward_config(N: int, num_sums: int) -> KernelConfig:
  """`VECTOR` adjacent states per thread; `num_sums`: sums over channels per token and state."""
  lanes = N // VECTOR
  # As many tokens at once as SMEM has room for.
  tokens_per_sum = 2 if num_sums <= 2 else 1
  return KernelConfig(lanes=lanes, num_tiles=lanes, tokens_per_sum=tokens_per_sum)

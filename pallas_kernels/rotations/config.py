"""Configurations of the rotations' kernels."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.core import device, tuning

LANES = 32
WARPS = 4  # per CTA; each has every fourth head


class Shape(NamedTuple):
  """Sizes for which a configuration is chosen."""

  chunks: int
  tokens: int  # of a chunk
  heads: int
  channels: int
  pairs: int  # of channels that rotate
  rank: int = 1  # keys of a token for one head
  groups: int = 1  # of heads that share keys

  @property
  def shape_class(self) -> str:
    """The key of a device's table."""
    return f"H{self.heads} N{self.channels} A{self.pairs}"

  @property
  def sharing(self) -> int:
    """Heads that share a key; a CTA has heads of one such group."""
    return self.heads // self.groups

  def groups_of(self, heads: int) -> int:
    """Into how many groups for CTAs of so many the R heads' keys are cut."""
    return self.rank * self.heads // heads


def takes(heads: int, channels: int, pairs: int) -> bool:
  """Whether there is a configuration for these sizes."""
  whole = pairs > 0 and pairs % LANES == 0 and channels % pairs == 0 and channels >= 2 * pairs
  return heads % WARPS == 0 and whole and channels <= 8 * LANES


@dataclasses.dataclass(frozen=True)
class KernelConfig:
  """How a kernel runs."""

  heads: int  # of a CTA
  ctas_per_sm: int

  def chunks(self, shape: Shape) -> int:
    """Chunks that a CTA computes one after another: enough CTAs for all SMs, where there are."""
    ctas = shape.chunks * shape.groups_of(self.heads)
    least, number = self.ctas_per_sm * device.current().sm_count, 1
    while shape.chunks % (2 * number) == 0 and ctas >= 2 * number * least:
      number *= 2
    return number


@dataclasses.dataclass(frozen=True)
class Config:
  """Both kernels."""

  forward: KernelConfig
  backward: KernelConfig

  def smem(self, shape: Shape) -> dict[str, int]:
    """Bytes of SMEM per CTA by kernel."""
    angles = shape.tokens * self.backward.heads * shape.pairs
    sums = WARPS**2 * (2 * shape.channels + shape.pairs)
    return {"forward": 0, "backward": 4 * (angles + sums)}

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the configuration does not fit the shape."""
    for name in ("forward", "backward"):
      heads = getattr(self, name).heads
      if heads % WARPS or shape.sharing % heads:
        raise ValueError(
          f"rotations: {name}.heads={heads} must be a multiple of {WARPS} and divide "
          f"{shape.sharing}."
        )


def default(shape: Shape) -> Config:
  """The configuration for a shape on the current device. Measured on an H100 at H32 N128 A32."""
  heads = lambda *sizes: next(h for h in sizes if shape.sharing % h == 0)
  config = Config(KernelConfig(heads(16, 8, 4), 8), KernelConfig(heads(16, 8, 4), 4))
  return tuning.tuned("rotations", shape.shape_class, config)

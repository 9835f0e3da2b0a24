"""Configurations of the diagonal scan's kernels. Never keyed on a length."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.core import tuning
from pallas_kernels.core.channel_grid import PipelineConfig, fitting_stages, pipeline_smem

GROUP = 8  # tokens whose rows are loaded together, before any of their results is stored
_CHUNKS = (32, 16, 8)  # tokens
_MIN_STAGES = 4


class Shape(NamedTuple):
  """Bytes per token and channel, for which a configuration is chosen."""

  x: int
  decay: int  # 0 for a constant
  h: int  # of the states, which are the output

  @property
  def shape_class(self) -> str:
    """The key of a device's table."""
    return f"x{self.x}-decay{self.decay}-h{self.h}-bytes"

  @property
  def traffic(self) -> dict[str, tuple[int, int]]:
    """Bytes of the streams and of the results of each kernel of `Config`."""
    gradients = self.x + self.decay
    return {
      "forward": (self.x + self.decay, self.h),
      "forward_states": (self.x + self.decay, 0),
      "backward": (2 * self.h + self.decay, gradients),
      "backward_states": (self.h + self.decay, 0),
    }


@dataclasses.dataclass(frozen=True)
class Config:
  """All kernels; those of `_states` are the first passes over a sequence in splits."""

  forward: PipelineConfig
  forward_states: PipelineConfig
  backward: PipelineConfig
  backward_states: PipelineConfig

  def smem(self, shape: Shape) -> dict[str, int]:
    """Bytes of SMEM per CTA by kernel."""
    return {
      name: pipeline_smem(getattr(self, name), *of_kernel)
      for name, of_kernel in shape.traffic.items()
    }

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the configuration does not fit the shape or the device."""
    for name in shape.traffic:
      chunk = getattr(self, name).chunk
      if chunk % GROUP:
        raise ValueError(f"diagonal_scan: {name}.chunk={chunk} must be a multiple of {GROUP}.")
    tuning.check_smem("diagonal_scan", self.smem(shape))


def default(shape: Shape) -> Config:
  """The configuration for a shape on the current device."""
  config = Config(**{name: _longest(*of_kernel) for name, of_kernel in shape.traffic.items()})
  return tuning.tuned("diagonal_scan", shape.shape_class, config)


def _longest(bytes_in, bytes_out):
  """The longest chunks of which enough fit in SMEM."""
  for chunk in _CHUNKS:
    stages = fitting_stages(chunk, bytes_in=bytes_in, bytes_out=bytes_out)
    if stages >= _MIN_STAGES:
      return PipelineConfig(chunk, stages)
  raise ValueError(f"{bytes_in=} and {bytes_out=} per token and channel do not fit in SMEM.")

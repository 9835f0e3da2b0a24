"""Configurations of the diagonal scan's kernels. Never keyed on a length."""

from typing import NamedTuple

from pallas_kernels.core import tuning
from pallas_kernels.core.channel_grid import (
  PipelineConfig,
  ScanConfig,
  Traffic,
  fitting_stages,
  max_stages,
)

GROUP = 8  # tokens whose rows are loaded together, before any of their results is stored
_CHUNKS = (32, 16, 8)  # tokens
_MIN_STAGES = 4
_MOST_BYTES_IN_REGISTERS = 192  # per thread, of the next chunk where it waits there


class Shape(NamedTuple):
  """Bytes per token and channel, for which a configuration is chosen."""

  x: int
  decay: int  # 0 for a constant
  h: int  # of the states, which are the output

  @property
  def shape_class(self) -> str:
    """The key of a device's table."""
    return f"x{self.x}-decay{self.decay}-h{self.h}-bytes"

  def traffic(self, chunk: int) -> Traffic:
    """Bytes of the streams and of the results of each kernel."""
    del chunk
    inputs = self.x + self.decay
    return {
      "forward": (inputs, self.h),
      "forward_states": (inputs, 0),
      "backward": (2 * self.h + self.decay, inputs),
      "backward_states": (self.h + self.decay, 0),
    }


class Config(ScanConfig):
  """All kernels of the diagonal scan."""

  op, group = "diagonal_scan", GROUP


def default(shape: Shape) -> Config:
  """The configuration for a shape on the current device."""
  config = Config(**{name: _longest(*of_kernel) for name, of_kernel in shape.traffic(0).items()})
  return tuning.tuned("diagonal_scan", shape.shape_class, config)


def _longest(bytes_in, bytes_out):
  """The longest chunks of which enough fit in SMEM."""
  for chunk in _CHUNKS:
    if max_stages() == 1 and chunk * bytes_in > _MOST_BYTES_IN_REGISTERS and chunk > GROUP:
      continue
    stages = fitting_stages(chunk, bytes_in=bytes_in, bytes_out=bytes_out)
    if stages >= min(_MIN_STAGES, max_stages()):
      return PipelineConfig(chunk, stages)
  raise ValueError(f"{bytes_in=} and {bytes_out=} per token and channel do not fit in SMEM.")

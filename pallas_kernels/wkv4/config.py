"""Configurations of WKV-4's kernels. Never keyed on a length."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.core import tuning
from pallas_kernels.core.channel_grid import PipelineConfig, ScanConfig, Traffic, fitting_stages

CHUNK = 16  # tokens: as many as the backward pass holds in registers
GROUP = 8  # tokens whose rows are loaded together, before any of their results is stored
STATE_ROWS = 3  # of a state in memory: max, numerator, denominator


class Shape(NamedTuple):
  """Bytes per token and channel, for which a configuration is chosen."""

  k: int
  v: int

  @property
  def shape_class(self) -> str:
    """The key of a device's table."""
    return f"k{self.k}-v{self.v}-bytes"

  def traffic(self, chunk: int) -> Traffic:
    """Bytes of the streams and of the results of each kernel."""
    # A chunk of the backward pass also brings the state that enters it.
    gradient = self.k + 2 * self.v + 4 * STATE_ROWS / chunk
    return {
      "forward": (self.k + self.v, self.v),
      "forward_states": (self.k + self.v, 0),
      "backward": (gradient, self.k + self.v),
      "backward_states": (gradient, 0),
    }


class Config(ScanConfig):
  """All kernels of WKV-4."""

  op, group = "wkv4", GROUP

  def check(self, shape: Shape) -> None:
    """Raises a ValueError where the configuration does not fit the shape or the device."""
    for field in dataclasses.fields(self):
      chunk = getattr(self, field.name).chunk
      if chunk != self.forward.chunk:
        raise ValueError(
          f"wkv4: {field.name}.chunk={chunk} must be forward.chunk={self.forward.chunk}: states "
          "that enter the chunks are stored."
        )
    super().check(shape)


def default(shape: Shape) -> Config:
  """The configuration for a shape on the current device."""
  configs = {
    name: PipelineConfig(CHUNK, fitting_stages(CHUNK, bytes_in=bytes_in, bytes_out=bytes_out))
    for name, (bytes_in, bytes_out) in shape.traffic(CHUNK).items()
  }
  return tuning.tuned("wkv4", shape.shape_class, Config(**configs))

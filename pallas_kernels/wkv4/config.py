"""Tile sizes of WKV-4's kernels. Never keyed on the length of the sequence."""

from pallas_kernels.core.channel_grid import PipelineConfig, fitting_stages

CHUNK = 16  # tokens: as many as the backward pass holds in registers
GROUP = 8  # tokens whose rows are loaded together, before any of their results is stored
STATE_ROWS = 3  # of a state in memory: max, numerator, denominator


def forward_config(*, bytes_in: int, bytes_out: int) -> PipelineConfig:
  """For so many bytes per token and channel."""
  return PipelineConfig(CHUNK, fitting_stages(CHUNK, bytes_in=bytes_in, bytes_out=bytes_out))


def backward_config(*, bytes_in: int, bytes_out: int) -> PipelineConfig:
  """The same; a chunk also brings the state that enters it."""
  bytes_of_state = 4 * STATE_ROWS / CHUNK
  stages = fitting_stages(CHUNK, bytes_in=bytes_in + bytes_of_state, bytes_out=bytes_out)
  return PipelineConfig(CHUNK, stages)

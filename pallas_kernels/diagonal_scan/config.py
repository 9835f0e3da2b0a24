"""Tile sizes of the diagonal scan's kernels. Never keyed on the length of the sequence."""

from pallas_kernels.core.channel_grid import PipelineConfig, fitting_stages

GROUP = 8  # tokens whose rows are loaded together, before any of their results is stored
_CHUNKS = (32, 16, 8)  # tokens
_MIN_STAGES = 4


def pipeline_config(*, bytes_in: int, bytes_out: int) -> PipelineConfig:
  """The longest chunks of which enough fit in SMEM, for so many bytes per token and channel."""
  for chunk in _CHUNKS:
    stages = fitting_stages(chunk, bytes_in=bytes_in, bytes_out=bytes_out)
    if stages >= _MIN_STAGES:
      return PipelineConfig(chunk, stages)
  raise ValueError(f"{bytes_in=} and {bytes_out=} per token and channel do not fit in SMEM.")

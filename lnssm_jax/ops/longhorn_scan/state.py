"""The state that the Longhorn scan carries along time."""

from typing import NamedTuple

import jax


class LonghornState(NamedTuple):
  """What a sequence leaves behind. float32 (float64 for float64 inputs)."""

  memory: jax.Array  # [B, D, N], the linear map from keys to inputs

"""The state that the selective scan carries along time."""

from typing import NamedTuple

import jax


class SelectiveState(NamedTuple):
  """What a sequence leaves behind. float32 (float64 for float64 inputs)."""

  ssm: jax.Array  # [B, D, N], the decayed sum of (dt x) b^T

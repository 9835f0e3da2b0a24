"""The state that the delta rule carries along time."""

from typing import NamedTuple

import jax


class DeltaRuleState(NamedTuple):
  """What a sequence leaves behind. float32 (float64 for float64 inputs)."""

  kv: jax.Array  # [B, H, K, V], the map from keys to values learned so far

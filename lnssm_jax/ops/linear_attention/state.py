"""The state that linear attention carries along time."""

from typing import NamedTuple

import jax


class LinearAttentionState(NamedTuple):
  """What a sequence leaves behind. float32 (float64 for float64 inputs)."""

  kv: jax.Array  # [B, H, K, V], the decayed sum of k v^T
  key_sum: jax.Array | None = None  # [B, H, K], the decayed sum of k; None without the normaliser

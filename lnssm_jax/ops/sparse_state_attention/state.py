"""The state that sparse state attention carries along time."""

from typing import NamedTuple

import jax


class SparseState(NamedTuple):
  """What a sequence leaves behind in each partition. float32 (float64 for float64 inputs)."""

  kv: jax.Array  # [B, N, H, K, V], the decayed sum of k v^T over the steps that used the partition

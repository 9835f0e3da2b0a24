"""The state that a diagonal scan carries along time."""

from typing import NamedTuple

import jax


class DiagonalState(NamedTuple):
  """What a sequence leaves behind. float32, or complex64 where the scan is complex (or 64 bit)."""

  h: jax.Array  # [B, D], the last h in the direction of the scan

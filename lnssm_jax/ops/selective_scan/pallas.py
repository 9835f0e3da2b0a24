"""The selective scan on the Mosaic-GPU kernels.

Import this module where it is needed only (see `dispatch.Kernels`).
"""

import jax.numpy as jnp

from lnssm_jax.ops.core.channel_kernels import ChannelScan
from lnssm_jax.ops.selective_scan.chunked import chunked
from pallas_kernels.channel_states.selective import SelectiveScan

_SCAN = ChannelScan(
  fields={"x": "x", "rate": "dt", "a": "a", "write_key": "b", "read_key": "c"},
  recurrence=SelectiveScan,
  is_exact=lambda x, N: x.dtype == jnp.float32,
  chunked=chunked,
)
unsupported, preferred = _SCAN.unsupported, _SCAN.preferred
run, interpreted = _SCAN.run, _SCAN.interpreted

"""The Longhorn scan on the Mosaic-GPU kernels.

Import this module where it is needed only (see `dispatch.Kernels`).
"""

import jax.numpy as jnp

from lnssm_jax.ops.core.channel_kernels import ChannelScan, is_cut
from lnssm_jax.ops.longhorn_scan.chunked import chunked
from lnssm_jax.ops.longhorn_scan.gains import sum_of_others
from pallas_kernels.channel_states.longhorn import LonghornScan


def _sums_of_squares(arrays):
  """Sums of squares of the keys' entries, without and with the entry's own, for T > 1."""
  squares = jnp.square(arrays["write_key"].astype(jnp.float32))
  return {"other_squares": sum_of_others(squares), "key_norm": jnp.sum(squares, axis=-1)}


_SCAN = ChannelScan(
  fields={"x": "x", "rate": "beta", "write_key": "k", "read_key": "q"},
  recurrence=LonghornScan,
  is_exact=lambda x, N: x.dtype == jnp.float32 or is_cut(N),
  chunked=chunked,
  prepare=_sums_of_squares,
)
unsupported, preferred, run = _SCAN.unsupported, _SCAN.preferred, _SCAN.run

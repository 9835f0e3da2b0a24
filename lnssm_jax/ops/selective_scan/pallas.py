"""The selective scan on the Mosaic-GPU kernels.

Import this module where it is needed only (see `dispatch.Kernels`).
"""

import jax.numpy as jnp

from lnssm_jax.ops.core.channel_kernels import ChannelScan
from lnssm_jax.ops.core.channel_states import Options
from lnssm_jax.ops.selective_scan.chunked import chunked
from lnssm_jax.ops.selective_scan.types import Inputs, has_shared_rates, with_all_rates
from pallas_kernels.channel_states.selective import SelectiveScan

# With one rate per channel the kernels' time grows with N, that of XLA's matrix products little. An
# estimate from the times in README.md; no GPU has compared the two.
_MOST_OF_ONE_RATE, _MOST_OF_ONE_RATE_EXACT = 64, 32

_SCAN = ChannelScan(
  fields={"x": "x", "rate": "dt", "a": "a", "write_key": "b", "read_key": "c"},
  recurrence=SelectiveScan,
  is_exact=lambda x, N: x.dtype == jnp.float32,
  chunked=chunked,
)
unsupported = _SCAN.unsupported


def preferred(inputs: Inputs, options: Options) -> bool:
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these."""
  T, N = inputs.x.shape[1], inputs.b.shape[2]
  most = _MOST_OF_ONE_RATE_EXACT if inputs.x.dtype == jnp.float32 else _MOST_OF_ONE_RATE
  if has_shared_rates(inputs) and T > 1 and most < N:
    return False
  return _SCAN.preferred(inputs, options)


def run(inputs: Inputs, options: Options, **more):
  """`ChannelScan.run`, with a rate for each of the N numbers of a channel."""
  return _SCAN.run(with_all_rates(inputs), options, **more)

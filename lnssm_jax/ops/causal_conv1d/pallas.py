"""The convolution on the Mosaic-GPU kernels: supported arguments, padding, the call.

Import this module where it is needed only (see `dispatch.Kernels`).
"""

import jax.numpy as jnp

from lnssm_jax.ops.causal_conv1d.reference import last_inputs
from lnssm_jax.ops.causal_conv1d.types import Inputs, Options
from pallas_kernels.causal_conv1d import config
from pallas_kernels.causal_conv1d import kernel as conv

_DTYPES = (jnp.bfloat16, jnp.float32)
_MOST_SEQUENCES = 65535  # thread blocks along the third axis of a grid
_LANES = 128


def unsupported(inputs: Inputs, options: Options) -> str | None:
  """Why the kernels cannot run these arguments on any device, or None."""
  x, kernel = inputs.x, inputs.kernel
  dtypes = {"x": x.dtype, "y": options.dtype}
  if inputs.offsets is not None:
    dtypes["offsets"] = inputs.offsets.dtype
  for name, dtype in dtypes.items():
    if dtype not in _DTYPES:
      return f"{name} has dtype {dtype}, and the kernels take bfloat16 and float32"
  if not 1 <= x.shape[0] <= _MOST_SEQUENCES:
    return f"x has {x.shape[0]} sequences, and a grid of thread blocks takes 1 to {_MOST_SEQUENCES}"
  S, W, _ = kernel.shape
  if W > config.MAX_WIDTH:
    return f"the kernel has W={W}, and a thread keeps at most {config.MAX_WIDTH} tokens"
  if S > config.MAX_CONVOLUTIONS:
    return (
      f"there are S={S} convolutions of x, and a thread keeps at most {config.MAX_CONVOLUTIONS}"
    )
  return None


def preferred(inputs: Inputs, options: Options) -> bool:
  """Whether `implementation=None` takes the kernels for sizes like these.

  XLA fuses a single token into one loop; padding of channels would copy x.
  """
  del options
  return inputs.x.shape[1] > 1 and inputs.x.shape[2] % _LANES == 0


def run(inputs: Inputs, options: Options, *, sizes=None, interpret=None):
  """`sizes`: the configuration of the kernels; None takes that of the table."""
  x, kernel, bias, offsets, state, segments = inputs
  D, (S, W, _) = x.shape[2], kernel.shape
  more = -D % _LANES
  pad = lambda array: jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, more)])
  wide = lambda array: None if array is None else pad(array.astype(jnp.float32))
  columns = None if offsets is None else pad(offsets.reshape(*x.shape[:2], S, D))
  bytes_offset = 0 if offsets is None else offsets.dtype.itemsize
  shape = config.Shape(D + more, x.dtype.itemsize, S, bytes_offset, segments is not None)
  sizes = sizes or config.default(shape)
  sizes.check(shape)
  static = conv.Static(options.silu, jnp.dtype(options.dtype), sizes, interpret)
  before = None if state is None or W == 1 else state.inputs
  arrays = conv.Inputs(pad(x), pad(kernel.astype(jnp.float32)), wide(bias), columns, wide(before))
  y = conv.causal_conv1d(static, arrays, None if segments is None else segments.first())
  return tuple(z[..., :D] for z in y), last_inputs(inputs)

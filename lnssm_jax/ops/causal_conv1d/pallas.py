"""The convolution on the Mosaic-GPU kernels: which arguments they take, and how they take them.

Import this module where it is needed only (see `dispatch.kernels`).
"""

import functools

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lnssm_jax.ops.causal_conv1d.xla import last_inputs
from lnssm_jax.ops.checks import first_of_segment
from pallas_kernels.causal_conv1d import op, shapes

_DTYPES = (jnp.bfloat16, jnp.float32)
_MOST_SEQUENCES = 65535  # blocks along the third axis of a grid
_LANES = 128


def obstacle(x, kernel, bias, state, segments, *, silu, dtype):
  """Why the kernels cannot run these arguments on any device, or None."""
  del bias, state, segments, silu
  for name, given in (("x", x.dtype), ("y", dtype)):
    if given not in _DTYPES:
      return f"{name} has dtype {given}, and the kernels take bfloat16 and float32"
  if not 1 <= x.shape[0] <= _MOST_SEQUENCES:
    return f"x has {x.shape[0]} sequences, and a grid of blocks takes 1 to {_MOST_SEQUENCES}"
  if len(kernel) > shapes.WIDEST:
    return f"the kernel has W={len(kernel)}, and a thread keeps at most {shapes.WIDEST} steps"
  return None


def worthwhile(x, kernel, bias, state, segments, *, silu, dtype):
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these.

  A single step is one fused loop of XLA's; padding of channels would copy x.
  """
  del kernel, bias, state, segments, silu, dtype
  return x.shape[1] > 1 and x.shape[2] % _LANES == 0


def run(x, kernel, bias, state, segments, *, silu, dtype, sizes=None, interpret=None):
  """Arguments as in `xla.py`; `sizes`: of the forward and the backward kernel, else the table's."""
  D, W = x.shape[2], len(kernel)
  more = -D % _LANES
  pad = lambda array: jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, more)])
  wide = lambda array: None if array is None else pad(array.astype(jnp.float32))
  forward, backward = sizes or (
    shapes.sizes(D + more, x.dtype, backward=backward) for backward in (False, True)
  )
  static = op.Static(silu, jnp.dtype(dtype), forward, backward, interpret)
  before = None if W == 1 else state  # which has no steps then
  inputs = op.Inputs(pad(x), wide(kernel), wide(bias), wide(before))
  y = op.causal_conv1d(static, inputs, first_of_segment(segments))
  return y[..., :D], last_inputs(x, state, segments, W)


interpreted = functools.partial(run, interpret=plgpu.InterpretGPUParams(detect_races=True))

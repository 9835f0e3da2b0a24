"""One step of RWKV-4's scan in one kernel, which updates the state in place.

XLA makes several loops of the same step: its results, the output and three arrays of the state, are
read by one another.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import channels, steps
from pallas_kernels.channels import CHANNELS
from pallas_kernels.wkv4 import step
from pallas_kernels.wkv4.scan import PARAMS


def obstacle(k, v, state) -> str | None:
  """Why `decode` cannot run these arguments, or None. Shapes are taken to agree."""
  said = (steps.state_obstacle(x) for x in state)
  return steps.dtype_obstacle(k=k, v=v) or next((reason for reason in said if reason), None)


def fits(D: int) -> bool:
  """Whether the state needs no padding, which would copy it."""
  return D % CHANNELS == 0


def decode(k, v, decay_rate, bonus, state, *, interpret=None):
  """(out [B, D] in the dtype of v, state) after one step.

  The returned state uses the buffers of the argument if D is a multiple of 128; otherwise all is
  padded with zeros outside the kernel and cut afterwards.

  Args:
    k, v: [B, D]; bfloat16 or float32, computed in float32.
    decay_rate, bonus: float32 [D].
    state: (max, numerator, denominator), float32 [B, D] each.
    interpret: `plgpu.InterpretGPUParams`, or None to compile.

  Raises:
    ValueError: `obstacle` has something to say.
  """
  reason = obstacle(k, v, state)
  if reason is not None:
    raise ValueError(f"decode: {reason}.")
  D = k.shape[-1]
  arrays = k, v, decay_rate, bonus, tuple(state)
  if fits(D):
    return _decode(*arrays, interpret=interpret)
  padded = jax.tree.map(lambda x: steps.padded(x, -D % CHANNELS), arrays)
  return jax.tree.map(lambda x: x[:, :D], _decode(*padded, interpret=interpret))


# Under `jit`, so that a stack of layers has one kernel.
@functools.partial(jax.jit, static_argnames="interpret")
def _decode(k, v, decay_rate, bonus, state, *, interpret):
  """`decode` for whole blocks of channels."""
  B, D = k.shape

  def body(inputs, state_refs, out_ref):
    row, here = lax.axis_index("row"), pl.ds(lax.axis_index("block") * CHANNELS, CHANNELS)
    # All loads first: they travel together.
    maximum, numerator, denominator = (channels.row_anywhere(x.at[row, here]) for x in state_refs)
    key, value = (channels.row_anywhere(x.at[row, here]) for x in inputs[:2])
    rate, bonus = (channels.row_anywhere(x.at[here]) for x in inputs[2:])
    before = step.state_of(maximum, numerator, denominator)
    past, present = step.read_weights(before, key, bonus, interpret)
    total = step.reciprocal(past * denominator + present, interpret)
    channels.put_anywhere(out_ref.at[row, here], (past * numerator + present * value) * total)
    after, _ = step.advance(before, key, value, rate, interpret)
    for ref, x in zip(state_refs, after[:3], strict=True):
      channels.put_anywhere(ref.at[row, here], x)

  # `plgpu.kernel` has no way to name aliases; a mutable reference becomes one.
  refs = tuple(jax.new_ref(x) for x in state)
  out = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((B, D), v.dtype),
    grid=(D // CHANNELS, B),
    grid_names=("block", "row"),
    compiler_params=PARAMS,
    interpret=interpret,
    kernel_name="wkv4_decode",
  )((k, v, decay_rate, bonus), refs)
  return out, tuple(jax.freeze(x) for x in refs)

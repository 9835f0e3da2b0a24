"""Norms on the Mosaic-GPU kernels: supported arguments, padding, the call.

Import this module where it is needed only (see `dispatch.Kernels`).
"""

import math

import jax
import jax.numpy as jnp

from lnssm_jax.ops.norms.types import ROW_AXES, Inputs, Options
from pallas_kernels.norms import config, kernel

_DTYPES = (jnp.bfloat16, jnp.float32)
_MIN_NUMBERS = 2**18  # in fewer, the start of a kernel takes longer than its work


def unsupported(inputs: Inputs, options: Options) -> str | None:
  """Why the kernels cannot run these arguments on any device, or None."""
  if inputs.x.ndim not in ROW_AXES:
    return f"x has {inputs.x.ndim} axes, and the kernels take {min(ROW_AXES)} to {max(ROW_AXES)}"
  arrays = {"x": inputs.x, "added": inputs.added, "gate": inputs.gate}
  dtypes = {name: array.dtype for name, array in arrays.items() if array is not None}
  for name, dtype in (dtypes | {"y": options.dtype}).items():
    if dtype not in _DTYPES:
      return f"{name} has dtype {dtype}, and the kernels take bfloat16 and float32"
  D = inputs.x.shape[-1]
  if not config.takes(D):
    return (
      f"x has {D} channels, and the kernels take multiples of {config.LANES}, from "
      f"{config.SHARED_FROM} on of {config.LANES * config.WARPS}, up to {config.MAX_CHANNELS}"
    )
  return None


def preferred(inputs: Inputs, options: Options) -> bool:
  """Whether `implementation=None` takes the kernels for sizes like these.

  XLA fuses a few tokens into one loop; padding of rows would copy x. Tensor parallelism may shard
  the channels of all heads: XLA then adds up their sums, and a kernel would need all of x.
  """
  del options
  rows = math.prod(inputs.x.shape[:-1])
  if inputs.x.ndim < 4 and jax.sharding.get_abstract_mesh().shape.get("tensor", 1) > 1:
    return False
  return rows % config.WARPS == 0 and inputs.x.size >= _MIN_NUMBERS


def run(inputs: Inputs, options: Options, *, sizes=None, interpret=None):
  """`sizes`: the configuration of the kernels; None takes that of the table."""
  x, added, scale, bias, gate = inputs
  D, shape = x.shape[-1], x.shape
  number = math.prod(shape[:-1])
  per_head = any(z is not None and z.ndim == 2 for z in (scale, bias))
  period = math.lcm(config.WARPS, shape[-2] if per_head else 1)
  more = -number % period
  rows = lambda z: jnp.pad(z.reshape(number, D), ((0, more), (0, 0)))

  def wide(z):
    if z is None or not per_head:
      return z if z is None else z.astype(jnp.float32)
    return jnp.tile(jnp.broadcast_to(z, shape[-2:]).astype(jnp.float32), (period // shape[-2], 1))

  of = config.Shape(D, number + more)
  sizes = sizes or config.default(of)
  sizes.check(of)
  static = kernel.Static(**options._asdict(), config=sizes, interpret=interpret)
  arrays = kernel.Inputs(
    x=rows(x),
    added=None if added is None else rows(added),
    scale=wide(scale),
    bias=wide(bias),
    gate=None if gate is None else rows(gate),
  )
  results = kernel.normalize(static, arrays)
  return tuple(jax.tree.map(lambda z: z[:number].reshape(shape), results))

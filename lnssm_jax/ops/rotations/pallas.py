"""Rotations on the Mosaic-GPU kernels: supported arguments, the call.

Import this module where it is needed only (see `dispatch.Kernels`).
"""

import jax.numpy as jnp

from lnssm_jax.ops.rotations.types import CHUNK, Inputs, Options
from pallas_kernels.rotations import config, kernel

_DTYPES = (jnp.bfloat16, jnp.float32)


def unsupported(inputs: Inputs, options: Options) -> str | None:
  """Why the kernels cannot run these arguments on any device, or None."""
  (_, T, _, G, N), (_, L, H, A) = inputs.keys.shape, inputs.entering.shape
  for name, dtype in (("keys", inputs.keys.dtype), ("the result", options.dtype)):
    if dtype not in _DTYPES:
      return f"{name} has dtype {dtype}, and the kernels take bfloat16 and float32"
  if inputs.step.dtype != jnp.float32:
    return f"steps have dtype {inputs.step.dtype}, and the kernels take float32"
  if T != L * CHUNK:
    return f"chunks have {T // L} tokens, and the kernels take {CHUNK}"
  if not config.takes(H // G, N, A):
    return (
      f"{H // G} heads of {N} channels share keys, {A} pairs of which rotate, and the kernels take "
      f"multiples of {config.WARPS} heads and {config.LANES} pairs, and a multiple of {A} channels"
    )
  return None


def preferred(inputs: Inputs, options: Options) -> bool:
  """Whether `implementation=None` takes the kernels for sizes like these."""
  del options
  return inputs.keys.shape[1] > CHUNK


def run(inputs: Inputs, options: Options, *, sizes=None, interpret=None):
  """`sizes`: the configuration of the kernels; None takes that of the table."""
  B, T, R, G, N = inputs.keys.shape
  _, L, H, A = inputs.entering.shape
  rows = lambda x, *last: x.reshape(B * T, *last)
  of_heads = lambda x: x.swapaxes(0, 1).reshape(R * H, N).astype(jnp.float32)
  arrays = kernel.Inputs(
    keys=rows(inputs.keys, R * G, N),
    queries=rows(inputs.queries, R * G, N),
    key_offset=of_heads(inputs.key_offset),
    query_offset=of_heads(inputs.query_offset),
    pace=rows(inputs.pace, A),
    step=rows(inputs.step, H),
    weight=rows(inputs.weight, H),
    entering=inputs.entering.reshape(B * L, H, A),
    keep=jnp.broadcast_to(rows(inputs.keep, 1), (B * T, config.WARPS)),
  )
  sizes = sizes or config.default(arrays.shape)
  sizes.check(arrays.shape)
  static = kernel.Static(jnp.dtype(options.dtype), sizes, interpret)
  keys, queries = kernel.rotate(static, arrays)
  return keys.reshape(B, T, R, H, N), queries.reshape(B, T, R, H, N)

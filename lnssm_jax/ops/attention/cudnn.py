"""Softmax attention by cuDNN's kernel, through `jax.nn`."""

from typing import Literal

import jax
import jax.numpy as jnp

from lnssm_jax.ops.attention.types import Inputs, Options


def cudnn(
  inputs: Inputs, options: Options, *, backend: Literal["cudnn", "xla"] = "cudnn"
) -> jax.Array:
  """out [B, T, H, V], for supported arguments."""
  mask = options.mask
  # cuDNN counts the tokens next to the present one.
  window = None if mask.window is None else (mask.window - 1, 0)
  return jax.nn.dot_product_attention(
    *inputs[:3],
    scale=options.scale,
    is_causal=mask.causal,
    local_window_size=window,
    implementation=backend,
  )


def unsupported(inputs: Inputs, options: Options) -> str | None:
  """Why cuDNN cannot run these arguments, or None."""
  return _unsupported_arguments(inputs, options) or unsupported_device(inputs)


def _unsupported_arguments(inputs, options):
  q, k, v, state, segments, dropout_keys, sinks = inputs
  mask = options.mask
  if state is not None:
    return "initial_state: cuDNN reads no cache in the form of AttentionState."
  if segments is not None:
    return "segment_ids: cuDNN would need a mask of size T x T."
  if options.soft_cap is not None:
    return f"soft_cap={options.soft_cap}: cuDNN's kernel has no cap."
  if sinks is not None:
    return "sinks: cuDNN's softmax has no other terms than those of keys."
  if dropout_keys is not None:
    return f"dropout={options.dropout}: cuDNN draws masks of its own."
  if mask.block is not None:
    return "block: cuDNN would need a mask of size T x T."
  if mask.window is not None and not mask.causal:
    return "causal=False: cuDNN has windows for causal attention only."
  if {q.dtype, k.dtype, v.dtype} not in ({jnp.dtype("bfloat16")}, {jnp.dtype("float16")}):
    return f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; cuDNN takes bfloat16 or float16."
  if k.shape[-1] != v.shape[-1]:
    return f"k has width {k.shape[-1]} and v {v.shape[-1]}; they must be the same."
  if k.shape[-1] % 8:
    return f"k has width {k.shape[-1]}; it must be a multiple of 8."
  if q.shape[1] == 1:
    return "T = 1: there is nothing to fuse."
  return None


def unsupported_device(inputs: Inputs) -> str | None:
  """Why the default device cannot run cuDNN's kernel for heads of this width, or None."""
  device, width = jax.devices()[0], inputs.q.shape[-1]
  if device.platform != "gpu" or "cuda" not in device.client.platform_version:
    return f"the default device is a {device.platform}, not an NVIDIA GPU."
  capability = tuple(int(x) for x in device.compute_capability.split("."))
  if capability < (8, 0):
    return f"the GPU has compute capability {device.compute_capability}; 8.0 is needed."
  widest = 256 if capability >= (9, 0) else 128
  if width > widest:
    return f"k has width {width}; {widest} is the most on this GPU."
  return None

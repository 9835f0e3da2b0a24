"""Softmax attention by the platform's own kernel: cuDNN, through `jax.nn`."""

from typing import Literal

import jax
import jax.numpy as jnp


def fused(
  q,
  k,
  v,
  state,
  steps,
  *,
  rule,
  scale,
  segmented,
  chunk_size=None,
  backend: Literal["cudnn", "xla"] = "cudnn",
):
  """out [B, T, H, V], for arguments without an obstacle."""
  del state, steps, segmented, chunk_size
  # cuDNN counts the steps beside the present one.
  window = None if rule.window is None else (rule.window - 1, 0)
  return jax.nn.dot_product_attention(
    q,
    k,
    v,
    scale=scale,
    is_causal=rule.causal,
    local_window_size=window,
    implementation=backend,
  )


def obstacle(q, k, v, state, steps, *, rule, scale, segmented, chunk_size=None) -> str | None:
  """Why cuDNN cannot run these arguments, or None."""
  del steps, scale, chunk_size
  return _obstacle_of_arguments(q, k, v, state, rule, segmented) or _obstacle_of_device(q)


def _obstacle_of_arguments(q, k, v, state, rule, segmented):
  if state is not None:
    return "initial_state: cuDNN reads no cache in the form of AttentionState."
  if segmented:
    return "segment_ids: cuDNN would need a mask of size T x T."
  if rule.block is not None:
    return "block: cuDNN would need a mask of size T x T."
  if rule.window is not None and not rule.causal:
    return "causal=False: cuDNN has windows for causal attention only."
  if {q.dtype, k.dtype, v.dtype} not in ({jnp.dtype("bfloat16")}, {jnp.dtype("float16")}):
    return f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; cuDNN takes bfloat16 or float16."
  if k.shape[-1] != v.shape[-1]:
    return f"k has width {k.shape[-1]} and v {v.shape[-1]}; they must be the same."
  if k.shape[-1] % 8:
    return f"k has width {k.shape[-1]}; it must be a multiple of 8."
  if q.shape[1] == 1:
    return "T = 1: nothing to fuse."
  return None


def _obstacle_of_device(q):
  device = jax.devices()[0]
  if device.platform != "gpu" or "cuda" not in device.client.platform_version:
    return f"the default device is a {device.platform}, not an NVIDIA GPU."
  capability = tuple(int(x) for x in device.compute_capability.split("."))
  if capability < (8, 0):
    return f"the GPU has compute capability {device.compute_capability}; 8.0 is needed."
  widest = 256 if capability >= (9, 0) else 128
  if q.shape[-1] > widest:
    return f"k has width {q.shape[-1]}; {widest} is the most on this GPU."
  return None

"""Linear attention over many tokens: the entry point; `decode.py` has that of a single token.

The kernels of an architecture are a `forward`, which also leaves residuals, and a `backward`.
"""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_kernels import MADE_BY_KERNELS
from pallas_kernels.core import device
from pallas_kernels.core.gradients import custom_vjp, no_gradient
from pallas_kernels.linear_attention.config import Config, default
from pallas_kernels.linear_attention.sm90.backward import backward
from pallas_kernels.linear_attention.sm90.forward import forward
from pallas_kernels.linear_attention.types import Inputs, Options

_KERNELS = {"sm90": device.Kernels(forward, backward)}


def linear_attention(
  inputs: Inputs,
  segments: jax.Array | None,
  *,
  scale: float,
  length: int,
  num_splits: int,
  normalize: bool,
  config: Config | None = None,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Runs linear attention on padded arguments.

  Args:
    segments: [B, T] int32 counted from 0, padded with each row's last, or None.
    length: tokens before padding.
    num_splits: into which the sequence is cut.
    config: None takes `config.default`.
    interpret: `plgpu.InterpretGPUParams`, or None to compile.

  Returns:
    out [B, T, H, V] bfloat16, the last state [B, H, K, V] float32, and the last key sum [B, H, K]
    float32 or None.

  Raises:
    ValueError: the configuration does not fit these arguments or the device.
  """
  sizes = inputs.sizes(normalize)
  config = config or default(sizes)
  config.check(sizes)
  options = Options(scale, length, num_splits, normalize, config, interpret)
  return _linear_attention(options, inputs, segments)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _linear_attention(options, inputs, segments):
  return device.choose(_KERNELS).forward(options, inputs, segments, for_gradient=False)[0]


def _forward_rule(options, inputs, segments):
  decays = inputs.log_decay.perturbed  # whether they want a gradient
  is_leaf = lambda x: hasattr(x, "perturbed")
  inputs, segments = jax.tree.map(lambda x: x.value, (inputs, segments), is_leaf=is_leaf)
  results = device.choose(_KERNELS).forward(options, inputs, segments, for_gradient=True)
  name = functools.partial(checkpoint_name, name=MADE_BY_KERNELS)
  result, residuals = jax.tree.map(name, results)
  return result, (inputs, segments, residuals, () if decays else None)


def _backward_rule(options, residuals, cotangents):
  inputs, segments, residuals, decays = residuals
  cotangents = [None if isinstance(x, SymbolicZero) else x for x in cotangents]
  backward = device.choose(_KERNELS).backward
  d_inputs = backward(options, inputs, segments, residuals, cotangents, decays is not None)
  return d_inputs, no_gradient(segments)


_linear_attention.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)

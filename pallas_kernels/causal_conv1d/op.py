"""The causal convolution with its gradient. Kept for the backward pass are the arguments alone."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.causal_conv1d import conv, shapes


class Static(NamedTuple):
  """What the compiled program is specialised to."""

  silu: bool
  dtype: jnp.dtype  # of y
  forward: shapes.Sizes
  backward: shapes.Sizes
  interpret: object = None


class Inputs(NamedTuple):
  """D is a multiple of 128, W at most `shapes.WIDEST`."""

  x: jax.Array  # [B, T, D] bfloat16 or float32
  kernel: jax.Array  # [W, D] float32
  bias: jax.Array | None  # [D] float32
  initial: jax.Array | None  # [B, W - 1, D] float32; None: zeros


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def causal_conv1d(static, inputs, first):
  """y [B, T, D] in `static.dtype`.

  Args:
    first: [B, T] boolean, the steps that begin a segment, across which nothing is read; or None.
  """
  x, *others = inputs
  return conv.forward(
    x,
    *others,
    _flags(first, static.forward),
    sizes=static.forward,
    part=shapes.part(static.forward, *_sizes(x)),
    silu=static.silu,
    dtype=static.dtype,
    interpret=static.interpret,
  )


def _forward_rule(static, inputs, first):
  return causal_conv1d(static, inputs, first), (inputs, first)


def _backward_rule(static, kept, d_out):
  inputs, first = kept
  x, *others = inputs
  made = conv.backward(
    x,
    d_out,
    *others,
    _flags(first, static.backward),
    sizes=static.backward,
    part=shapes.part(static.backward, *_sizes(x)),
    silu=static.silu,
    interpret=static.interpret,
  )
  d_bias = None if inputs.bias is None else made["bias"].sum((0, 1))
  d_inputs = Inputs(made["x"], made["kernel"].sum((0, 1)), d_bias, made.get("initial"))
  no_gradient = None if first is None else np.zeros(first.shape, jax.dtypes.float0)
  return d_inputs, no_gradient


causal_conv1d.defvjp(_forward_rule, _backward_rule)


def _flags(first, sizes):
  return None if first is None else conv.packed(first, sizes.rows)


def _sizes(x):
  B, T, D = x.shape
  return B, D, T

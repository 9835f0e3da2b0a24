"""The diagonal recurrence with its gradient: the order of the kernels.

A long sequence with few channels is cut into parts, so that every multiprocessor has work: a first
pass finds what each part does to a state, `_joined` then the state that enters each part. Kept for
the backward pass are the decay and h, which is the output.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import MADE_BY_KERNELS
from pallas_kernels.diagonal_scan.scan import adjoint, scan


class Static(NamedTuple):
  """What the compiled program is specialised to."""

  reverse: bool
  length: int  # steps from here on are padding: x is 0, and a decay of steps 1
  parts: int = 1
  interpret: object = None


class Inputs(NamedTuple):
  """Tuples of the parts of a number, (real,) or (real, imaginary)."""

  decay: tuple  # [B, T, D], or [D] float32 for a constant
  x: tuple  # [B, T, D]
  initial: tuple  # [B, D] float32, as many parts as decay or x has at most


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def diagonal_scan(static, inputs, forget):
  """h_t = a_t h_{t-1} + x_t, or h_{t+1} with `static.reverse`.

  Args:
    static: `Static`; T is a multiple of `channels.padded_length(T, static.parts)`, D of 128.
    inputs: `Inputs`, bfloat16 or float32.
    forget: [B, T] int32, set at steps that take 0 in place of the state before; or None.

  Returns:
    (out, last): parts of h [B, T, D], in the dtype of a real x and float32 if complex, and of the
    state [B, D] float32 that the scan leaves.
  """
  return _forward(static, inputs, forget)[0]


def _forward(static, inputs, forget):
  decay, x, initial = inputs
  options = {"number_of_parts": static.parts, "interpret": static.interpret}
  options |= {"reverse": static.reverse, "length": static.length}
  product = None
  entering = tuple(y[:, None] for y in initial)
  if static.parts > 1:
    made = scan(decay, x, None, forget, outputs=False, **options)
    product = made["product"]
    entering = _joined(static, product, made["last"], initial, forget, static.reverse)
  made = scan(decay, x, entering, forget, **options)
  last = tuple(y[:, 0 if static.reverse else -1] for y in made["last"])
  return (made["out"], last), (decay, x, initial, forget, product, made["out"])


def _forward_rule(static, inputs, forget):
  result, kept = _forward(static, inputs, forget)
  *arguments, product, out = kept
  name = functools.partial(checkpoint_name, name=MADE_BY_KERNELS)
  # `out` is the result and what the backward pass reads: one array.
  (out, last), product = jax.tree.map(name, (result, product))
  decay, x, initial, forget = arguments
  like_x = tuple(jnp.zeros((0,), y.dtype) for y in x)  # of x only the dtype is needed
  return (out, last), (decay, like_x, initial, forget, product, out)


def _backward_rule(static, kept, cotangents):
  decay, x, initial, forget, product, out = kept
  d_out, d_last = cotangents
  options = {"number_of_parts": static.parts, "interpret": static.interpret}
  options |= {"reverse": static.reverse, "length": static.length}
  arriving = tuple(y[:, None] for y in d_last)
  if static.parts > 1:
    sent = adjoint(decay, d_out, None, None, None, forget, **options)["arriving"]
    turned = _conjugate(product)
    arriving = _joined(static, turned, sent, d_last, forget, not static.reverse)
  made = adjoint(
    *(decay, d_out, out, initial, arriving, forget),
    **{"real_x": len(x) < len(out), "x_dtype": x[0].dtype, **options},
  )
  d_decay = made["decay"]
  if decay[0].ndim == 1:
    d_decay = tuple(y.sum((0, 1)) for y in d_decay)
  d_initial = tuple(y[:, -1 if static.reverse else 0] for y in made["arriving"])
  no_gradient = None if forget is None else np.zeros(forget.shape, jax.dtypes.float0)
  return Inputs(d_decay, made["x"], d_initial), no_gradient


diagonal_scan.defvjp(_forward_rule, _backward_rule)


def _joined(static, product, left, first, forget, reverse):
  """What enters each part [B, P, D]: `left` by a part that nothing enters, and `product` times what
  enters it; `first` [B, D] enters the part that the walk meets first."""
  cut = None
  if forget is not None:
    cut = jnp.any(forget.reshape(forget.shape[0], static.parts, -1) != 0, axis=2)[..., None]
  entering = {}
  state = first
  for part in list(range(static.parts))[:: -1 if reverse else 1]:
    entering[part] = state
    through = _times(tuple(y[:, part] for y in product), state)
    if cut is not None:
      through = tuple(jnp.where(cut[:, part], 0.0, y) for y in through)
    state = tuple(y + z[:, part] for y, z in zip(through, left, strict=True))
  stack = lambda n: jnp.stack([entering[part][n] for part in range(static.parts)], axis=1)
  return tuple(stack(n) for n in range(len(first)))


def _conjugate(number):
  return (number[0], *(-y for y in number[1:]))


def _times(y, z):
  if len(y) == 1:
    return tuple(y[0] * part for part in z)
  return y[0] * z[0] - y[1] * z[1], y[0] * z[1] + y[1] * z[0]

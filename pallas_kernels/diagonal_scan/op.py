"""The diagonal recurrence h_t = a_t h_{t-1} + x_t: the entry point, with its `custom_vjp`.

    forward    h_t = a_t h_{t-1} + x_t                          (h_{t+1} with `reverse`)
    backward   g_t = d_t + p_{t+1}     p_t = conj(a_t) g_t      in the opposite direction of time
               dx_t = g_t              da_t = g_t conj(h_{t-1})

A number is a tuple of its parts, float32 in registers: (real,) or (real, imaginary). Gradients are
those of the parts, hence the conjugates.

A long sequence with few channels is split so that every SM has work. A first pass of the kernel
without outputs computes the state after each split that starts from zero, and the split's product
of decays; `_entering` combines them into the state that enters each split. The backward pass does
the same with cotangents. Residuals are the decays and h, which is the output.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import MADE_BY_KERNELS
from pallas_kernels.core import boundaries
from pallas_kernels.core.channel_grid import itemsize
from pallas_kernels.core.gradients import custom_vjp, no_gradient
from pallas_kernels.core.wgmma import Backend
from pallas_kernels.diagonal_scan.config import Config, Shape
from pallas_kernels.diagonal_scan.numbers import Parts, conjugate, times
from pallas_kernels.diagonal_scan.scan import backward_kernel, forward_kernel


class Static(NamedTuple):
  """Arguments that the compiled program is specialized to."""

  reverse: bool
  length: int  # tokens from here on are padding: x is 0, and a decay per token 1
  config: Config
  num_splits: int = 1
  backend: Backend = Backend()


class Inputs(NamedTuple):
  """Tuples of the parts of a number, (real,) or (real, imaginary)."""

  decay: tuple[jax.Array, ...]  # [B, T, D], or [D] float32 for a constant
  x: tuple[jax.Array, ...]  # [B, T, D]
  initial: tuple[jax.Array, ...]  # [B, D] float32, as many parts as decay or x has at most

  @property
  def sizes(self) -> Shape:
    """Sizes for which a configuration is chosen."""
    decay, x, _ = self
    width = max(len(decay), len(x))
    h = itemsize(x) if width == 1 else 4 * width
    return Shape(itemsize(x), 0 if decay[0].ndim == 1 else itemsize(decay), h)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def diagonal_scan(
  static: Static, inputs: Inputs, first: jax.Array | None
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
  """h_t = a_t h_{t-1} + x_t, or a_t h_{t+1} + x_t with `static.reverse`.

  Args:
    static: T is `channel_grid.padded_length(length, num_splits)`, D a multiple of 128.
    inputs: bfloat16 or float32.
    first: [B, T], set at tokens that read 0 in place of the state; or None.

  Returns:
    (out, last): parts of h [B, T, D], in the dtype of a real x and float32 if complex, and of the
    state after the last token, [B, D] float32.
  """
  return _forward(static, inputs, first)[0]


class _Residuals(NamedTuple):
  decay: Parts
  x_like: Parts  # empty arrays: only the dtype of x is needed
  initial: Parts
  first: Any
  decay_product: Parts | None  # of each split
  out: Parts


def _forward(static, inputs, first):
  decay, x, initial = inputs
  kernel, options = forward_kernel, _options(static)
  decay_product = None
  entering = tuple(y[:, None] for y in initial)
  if static.num_splits > 1:
    config = static.config.forward_states
    alone = kernel(decay, x, None, first, outputs=False, config=config, **options)
    decay_product = alone.decay_product
    entering = _entering(decay_product, alone.last, initial, first, static.reverse)
  results = kernel(decay, x, entering, first, config=static.config.forward, **options)
  last = tuple(y[:, 0 if static.reverse else -1] for y in results.last)
  return (results.out, last), decay_product


def _forward_rule(static, inputs, first):
  # `out` is the result and a residual: one array.
  named = functools.partial(checkpoint_name, name=MADE_BY_KERNELS)
  (out, last), decay_product = jax.tree.map(named, _forward(static, inputs, first))
  x_like = tuple(jnp.zeros((0,), y.dtype) for y in inputs.x)
  residuals = _Residuals(inputs.decay, x_like, inputs.initial, first, decay_product, out)
  return (out, last), residuals


def _backward_rule(static, residuals, cotangents):
  decay, x_like, initial, first, decay_product, out = residuals
  d_out, d_last = cotangents
  kernel, options = backward_kernel, _options(static)
  entering = tuple(y[:, None] for y in d_last)
  if static.num_splits > 1:
    config = static.config.backward_states
    alone = kernel(decay, d_out, None, None, None, first, config=config, **options)
    product = tuple(conjugate(decay_product))
    entering = _entering(product, alone.d_initial, d_last, first, not static.reverse)
  results = kernel(
    decay,
    d_out,
    out,
    initial,
    entering,
    first,
    x_dtype=x_like[0].dtype,
    x_is_real=len(x_like) < len(out),
    config=static.config.backward,
    **options,
  )
  d_decay = results.d_decay
  if decay[0].ndim == 1:
    d_decay = tuple(y.sum((0, 1)) for y in d_decay)
  d_initial = tuple(y[:, -1 if static.reverse else 0] for y in results.d_initial)
  return Inputs(d_decay, results.d_x, d_initial), no_gradient(first)


diagonal_scan.defvjp(_forward_rule, _backward_rule)


def _options(static):
  return {
    "reverse": static.reverse,
    "length": static.length,
    "num_splits": static.num_splits,
    "backend": static.backend,
  }


def _entering(product, left, initial, first, reverse):
  """The states that enter the splits, parts [B, P, D].

  `left` is the state after a split that starts from zero, `product` the split's product of decays,
  `initial` [B, D] the state that enters the split scanned first.
  """
  num_splits = left[0].shape[1]
  blocked = boundaries.in_splits(first, num_splits)
  entering = {}
  state = initial
  for split in list(range(num_splits))[:: -1 if reverse else 1]:
    entering[split] = state
    passed = tuple(times([y[:, split] for y in product], state))
    is_blocked = None if blocked is None else blocked[:, split]
    passed = boundaries.reset(is_blocked, passed, (0.0,) * len(passed))
    state = tuple(y + z[:, split] for y, z in zip(passed, left, strict=True))
  stack = lambda n: jnp.stack([entering[split][n] for split in range(num_splits)], axis=1)
  return tuple(stack(n) for n in range(len(initial)))

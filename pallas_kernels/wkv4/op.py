"""RWKV-4's scan with its gradient: the order of the kernels.

A long sequence with few channels is cut into parts, so that every multiprocessor has work: a first
pass finds the state that each part leaves if it is entered by none, and from these follow the
states that do enter. The backward pass does the same with adjoints.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import MADE_BY_KERNELS
from pallas_kernels.wkv4.adjoint import adjoint
from pallas_kernels.wkv4.scan import scan
from pallas_kernels.wkv4.step import EMPTY


class Static(NamedTuple):
  """What the compiled program is specialised to."""

  length: int  # steps from here on are padding
  parts: int = 1
  interpret: object = None


class Inputs(NamedTuple):
  """T is a multiple of `channels.padded_length(T, static.parts)`, D of 128."""

  k: jax.Array  # [B, T, D] bfloat16 or float32
  v: jax.Array  # [B, T, D] bfloat16 or float32
  decay_rate: jax.Array  # [D] float32
  bonus: jax.Array  # [D] float32
  max: jax.Array  # [B, D] float32; these three are the initial state
  numerator: jax.Array
  denominator: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def wkv4(static, inputs, forget):
  """RWKV-4's weighted mean of the values so far.

  Args:
    forget: [B, T] int32, set at steps that find an empty state; or None.

  Returns:
    (out, last): out [B, T, D] in the dtype of v, and (max, numerator, denominator) [B, D] float32,
    of which `max` is a scale without a gradient.
  """
  return _forward(static, inputs, forget, for_gradient=False)[0]


def _forward(static, inputs, forget, *, for_gradient):
  k, v, rate, bonus, *initial = inputs
  options = {
    "length": static.length,
    "number_of_parts": static.parts,
    "interpret": static.interpret,
  }
  entering = tuple(x[:, None] for x in initial)
  if static.parts > 1:
    left = scan(k, v, rate, bonus, None, forget, outputs=False, **options)["last"]
    size = k.shape[1] // static.parts
    steps = [min(max(static.length - n * size, 0), size) for n in range(static.parts)]
    entering = _entering(static, left, initial, rate, forget, steps)
  made = scan(k, v, rate, bonus, entering, forget, borders=for_gradient, **options)
  last = tuple(x[:, -1] for x in made["last"])
  return (made["out"], last), made.get("borders")


def _forward_rule(static, inputs, forget):
  result, borders = _forward(static, inputs, forget, for_gradient=True)
  name = functools.partial(checkpoint_name, name=MADE_BY_KERNELS)
  result, borders = jax.tree.map(name, (result, borders))
  return result, (inputs, forget, borders, result[1])


def _backward_rule(static, kept, cotangents):
  inputs, forget, borders, last = kept
  k, v, rate, bonus, *initial = inputs
  d_out, (_, d_numerator, d_denominator) = cotangents
  options = {
    "length": static.length,
    "number_of_parts": static.parts,
    "interpret": static.interpret,
  }
  arrays = k, v, rate, bonus, borders, d_out
  # The adjoint of the numerator, and that of a shift of all values.
  behind = d_numerator, d_denominator + d_numerator * _mean(last)
  arriving = tuple(x[:, None] for x in behind)
  if static.parts > 1:
    sent = adjoint(*arrays, None, forget, outputs=False, **options)
    arriving = _arriving(static, sent, behind, forget)
  made = adjoint(*arrays, arriving, forget, **options)
  d_numerator, d_shift = (x[:, 0] for x in made["arriving"])
  _, _, denominator = initial
  d_inputs = Inputs(
    made["k"],
    made["v"],
    made["rate"].sum((0, 1)),
    made["bonus"].sum((0, 1)),
    denominator * d_shift,
    d_numerator,
    d_shift - d_numerator * _mean(initial),
  )
  no_gradient = None if forget is None else np.zeros(forget.shape, jax.dtypes.float0)
  return d_inputs, no_gradient


wkv4.defvjp(_forward_rule, _backward_rule)


def _mean(state):
  _, numerator, denominator = state
  there = denominator > 0
  return jnp.where(there, numerator / jnp.where(there, denominator, 1), 0)


def _cut(static, forget):
  """[B, P, 1]: whether a part forgets what enters it; None: none does."""
  if forget is None:
    return None
  return jnp.any(forget.reshape(forget.shape[0], static.parts, -1) != 0, axis=2)[..., None]


def _entering(static, left, first, rate, forget, steps):
  """The states that enter the parts, [B, P, D] each, from those that they leave unentered.

  `steps`: how many steps each part has, without padding.
  """
  cut = _cut(static, forget)
  entering, state = [], tuple(first)
  for part in range(static.parts):
    entering.append(state)
    own_max, *own_sums = (x[:, part] for x in left)
    max_, *sums = state
    if cut is not None:
      max_ = jnp.where(cut[:, part], EMPTY, max_)
      sums = [jnp.where(cut[:, part], 0.0, x) for x in sums]
    decay = steps[part] * rate if steps[part] else jnp.zeros_like(rate)
    scale = jnp.maximum(jnp.maximum(max_ - decay, own_max), EMPTY)
    # In this order, as in a step: the difference of maxima is nearly exact.
    past, present = jnp.exp((max_ - scale) - decay), jnp.exp(own_max - scale)
    sums = [past * x + present * y for x, y in zip(sums, own_sums, strict=True)]
    state = (scale, *sums)
  return tuple(jnp.stack(x, axis=1) for x in zip(*entering, strict=True))


def _arriving(static, sent, behind, forget):
  """What the steps behind each part send back to it, [B, P, D]: (A, C)."""
  cut = _cut(static, forget)
  arriving, (A, C) = {}, behind
  for part in reversed(range(static.parts)):
    arriving[part] = A, C
    own_A, own_C = (x[:, part] for x in sent["arriving"])
    decay, shifted = (x[:, part] for x in sent["through"])
    through_A, through_C = decay * A, decay * C + shifted * A
    if cut is not None:
      through_A, through_C = (jnp.where(cut[:, part], 0.0, x) for x in (through_A, through_C))
    A, C = own_A + through_A, own_C + through_C
  stacked = lambda n: jnp.stack([arriving[part][n] for part in range(static.parts)], axis=1)
  return stacked(0), stacked(1)

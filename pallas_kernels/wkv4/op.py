"""WKV-4, the scan of RWKV-4: the entry point for many tokens, with its `custom_vjp`.

    N_t = e^{-w} N_{t-1} + e^{k_t} v_t          Z_t = e^{-w} Z_{t-1} + e^{k_t}
    y_t = (N_{t-1} + e^{u+k_t} v_t) / (Z_{t-1} + e^{u+k_t})

The state is (max, N / e^max, Z / e^max), with max the running maximum of the decayed keys.

A long sequence with few channels is split so that every SM has work. A first pass without outputs
computes the state after each split that starts from an empty one; `_entering_states` combines them
into the states that enter the splits. The backward pass does the same with cotangents.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import MADE_BY_KERNELS
from pallas_kernels.core import boundaries
from pallas_kernels.core.gradients import custom_vjp, no_gradient
from pallas_kernels.core.wgmma import Backend
from pallas_kernels.wkv4 import update
from pallas_kernels.wkv4.backward import backward_kernel
from pallas_kernels.wkv4.config import Config, Shape
from pallas_kernels.wkv4.forward import forward_kernel
from pallas_kernels.wkv4.update import StateRows


class Static(NamedTuple):
  """Arguments that the compiled program is specialized to."""

  length: int  # tokens from here on are padding
  config: Config
  num_splits: int = 1
  backend: Backend = Backend()


class Inputs(NamedTuple):
  """T is `channel_grid.padded_length(length, num_splits)`, D a multiple of 128."""

  k: jax.Array  # [B, T, D] bfloat16 or float32
  v: jax.Array  # [B, T, D] bfloat16 or float32
  decay_rate: jax.Array  # [D] float32
  bonus: jax.Array  # [D] float32
  max: jax.Array  # [B, D] float32; these three are the initial state
  numerator: jax.Array
  denominator: jax.Array

  @property
  def sizes(self) -> Shape:
    """Sizes for which a configuration is chosen."""
    return Shape(self.k.dtype.itemsize, self.v.dtype.itemsize)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def wkv4(static: Static, inputs: Inputs, first: jax.Array | None) -> tuple[jax.Array, StateRows]:
  """RWKV-4's weighted mean of the values so far.

  Args:
    first: [B, T], set at tokens that read an empty state; or None.

  Returns:
    (out, last): out [B, T, D] in the dtype of v, and (max, numerator, denominator) [B, D] float32,
    of which `max` is a scale without a gradient.
  """
  return _forward(static, inputs, first, for_gradient=False)[0]


def _forward(static, inputs, first, *, for_gradient):
  k, v, rate, bonus, *initial = inputs
  kernel, options = forward_kernel, _options(static)
  entering = tuple(x[:, None] for x in initial)
  if static.num_splits > 1:
    config = static.config.forward_states
    alone = kernel(k, v, rate, bonus, None, first, outputs=False, config=config, **options)
    size = k.shape[1] // static.num_splits
    tokens = [min(max(static.length - n * size, 0), size) for n in range(static.num_splits)]
    entering = _entering_states(alone.last, initial, rate, first, tokens)
  options |= {"config": static.config.forward, "chunk_states": for_gradient}
  results = kernel(k, v, rate, bonus, entering, first, **options)
  last = tuple(x[:, -1] for x in results.last)
  scale = None
  if for_gradient and static.num_splits > 1:
    scale = jnp.exp(results.last[0][:, :-1] - entering[0][:, 1:])
  return (results.out, last), (results.chunk_states, scale)


def _forward_rule(static, inputs, first):
  results = _forward(static, inputs, first, for_gradient=True)
  name = functools.partial(checkpoint_name, name=MADE_BY_KERNELS)
  result, kept = jax.tree.map(name, results)
  return result, (inputs, first, *kept, result[1])


def _backward_rule(static, residuals, cotangents):
  inputs, first, chunk_states, scale, last = residuals
  k, v, rate, bonus, *initial = inputs
  d_out, (_, d_numerator, d_denominator) = cotangents
  kernel, options = backward_kernel, _options(static)
  arrays = k, v, rate, bonus, chunk_states, d_out
  # The cotangent of the numerator, and that of a shift of all values.
  d_last = d_numerator, d_denominator + d_numerator * _mean(last)
  entering = tuple(x[:, None] for x in d_last)
  if static.num_splits > 1:
    config = static.config.backward_states
    alone = kernel(*arrays, None, first, outputs=False, config=config, **options)
    entering = _entering_cotangents(alone, d_last, first, scale)
  results = kernel(*arrays, entering, first, config=static.config.backward, **options)
  d_numerator, d_shift = (x[:, 0] for x in results.d_initial)
  _, _, denominator = initial
  d_inputs = Inputs(
    results.d_k,
    results.d_v,
    results.d_rate.sum((0, 1)),
    results.d_bonus.sum((0, 1)),
    denominator * d_shift,
    d_numerator,
    d_shift - d_numerator * _mean(initial),
  )
  return d_inputs, no_gradient(first)


wkv4.defvjp(_forward_rule, _backward_rule)


def _options(static):
  return {
    "length": static.length,
    "num_splits": static.num_splits,
    "backend": static.backend,
  }


def _mean(state):
  _, numerator, denominator = state
  there = denominator > 0
  return jnp.where(there, numerator / jnp.where(there, denominator, 1), 0)


def _entering_states(left, initial, rate, first, tokens):
  """The states that enter the splits, [B, P, D] each.

  `left` are the states after splits that start from an empty state; `tokens` how many each split
  has, without padding.
  """
  blocked = boundaries.in_splits(first, len(tokens))
  entering, state = [], tuple(initial)
  for split, count in enumerate(tokens):
    entering.append(state)
    own_max, *own_sums = (x[:, split] for x in left)
    is_blocked = None if blocked is None else blocked[:, split]
    max_, *sums = boundaries.reset(is_blocked, state, (update.EMPTY_MAX, 0.0, 0.0))
    decay = count * rate if count else jnp.zeros_like(rate)
    scale = jnp.maximum(jnp.maximum(max_ - decay, own_max), update.EMPTY_MAX)
    # In this order, as in `update.advance`: the difference of maxima is nearly exact.
    past, present = jnp.exp((max_ - scale) - decay), jnp.exp(own_max - scale)
    sums = [past * x + present * y for x, y in zip(sums, own_sums, strict=True)]
    state = (scale, *sums)
  return tuple(jnp.stack(x, axis=1) for x in zip(*entering, strict=True))


def _entering_cotangents(alone, d_last, first, scale):
  """The cotangents (A, C) of the states after the splits, [B, P, D] each.

  `scale` [B, P - 1, D] is exp of the maximum after a split less that of the state that enters the
  next one: token by token a maximum is rounded otherwise than over a whole split, and sums and
  cotangents are relative to it.
  """
  num_splits = alone.d_initial[0].shape[1]
  blocked = boundaries.in_splits(first, num_splits)
  entering, (A, C) = {}, d_last
  for split in reversed(range(num_splits)):
    if split < num_splits - 1:
      A, C = scale[:, split] * A, scale[:, split] * C
    entering[split] = A, C
    own_A, own_C = (x[:, split] for x in alone.d_initial)
    decay, shifted = (x[:, split] for x in alone.passed)
    passed = decay * A, decay * C + shifted * A
    is_blocked = None if blocked is None else blocked[:, split]
    passed_A, passed_C = boundaries.reset(is_blocked, passed, (0.0, 0.0))
    A, C = own_A + passed_A, own_C + passed_C
  stacked = lambda n: jnp.stack([entering[split][n] for split in range(num_splits)], axis=1)
  return stacked(0), stacked(1)

"""The convolution token by token: the oracle, run in float64."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.causal_conv1d.types import ConvState
from lnssm_jax.ops.core.spmd import vary_alike
from lnssm_jax.ops.long_convolution.types import (
  ExponentialKernel,
  ExponentialState,
  Inputs,
  Options,
)


def reference(inputs: Inputs, options: Options):
  """A `lax.scan` over time."""
  x, kernel, state, segments = inputs
  acc = options.acc
  batch, _, width = x.shape
  keep = jnp.ones(x.shape[:2], bool) if segments is None else ~segments.first()
  by_time = jnp.moveaxis(x, 1, 0).astype(acc), keep.T[:, :, None, None]

  if isinstance(kernel, ExponentialKernel):
    pole = jnp.exp(kernel.log_pole)
    h = jnp.zeros((batch, *pole.shape), pole.dtype) if state is None else state.h

    def step(h, inputs):
      x_t, keep_t = inputs
      h = pole * jnp.where(keep_t, h, 0) + x_t[..., None]
      out = jnp.real(kernel.coefficient * h).sum(-1)
      return h, out if kernel.direct is None else out + kernel.direct * x_t

    h, out = jax.lax.scan(step, vary_alike((h, x))[0], by_time)
    return jnp.moveaxis(out, 0, 1).astype(x.dtype), ExponentialState(h)

  taps = jnp.flip(kernel.astype(acc), 0)
  past = jnp.zeros((batch, taps.shape[0] - 1, width), acc) if state is None else state.inputs

  def step_of_taps(past, inputs):
    x_t, keep_t = inputs
    window = jnp.concatenate([jnp.where(keep_t, past, 0), x_t[:, None]], 1)
    return window[:, 1:], (taps * window).sum(1)

  past, out = jax.lax.scan(step_of_taps, vary_alike((past, x))[0], by_time)
  return jnp.moveaxis(out, 0, 1).astype(x.dtype), ConvState(past)

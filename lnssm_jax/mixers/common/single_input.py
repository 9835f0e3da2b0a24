"""The base class of state spaces with one input and one output per channel: S4, S4D, DSS."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common.activations import exact_gelu
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.mixers.common.complex_state import (
  ComplexState,
  empty_state,
  from_complex,
  to_complex,
)
from lnssm_jax.mixers.common.initializers import uniform_fan_in
from lnssm_jax.mixers.common.projections import Linear
from lnssm_jax.ops.core.precision import wide


def conjugate_pairs(state_dim: int) -> int:
  """Returns N / 2, or raises `ValueError` if N = `state_dim` is odd."""
  if check_positive("state_dim", state_dim) % 2:
    raise ValueError(
      f"state_dim={state_dim} is odd; complex numbers come in conjugate pairs, so use an even."
    )
  return state_dim // 2


def log_steps(size: int, param_dtype, rngs: nnx.Rngs, *, separate: bool = False) -> nnx.Param:
  """log(dt) [size], dt log-uniform between 0.001 and 0.1; with `separate` twice, [size, 2]."""
  steps = jax.random.uniform(rngs.params(), (size,), jnp.float32, math.log(1e-3), math.log(0.1))
  steps = jnp.stack([steps, steps], axis=-1) if separate else steps
  return nnx.Param(steps.astype(param_dtype))


def normal(shape, deviation, param_dtype, rngs: nnx.Rngs) -> nnx.Param:
  """Normal numbers of this shape, with this standard deviation."""
  values = deviation * jax.random.normal(rngs.params(), shape, jnp.float32)
  return nnx.Param(values.astype(param_dtype))


class SingleInput(Mixer[ComplexState]):
  """A state space of N numbers for each channel, then gelu and a gated linear layer.

      [a_t, g_t] = W_o gelu(y_t) + b_o,      out_t = a_t sigmoid(g_t)

  Subclasses write `_filter`, which computes y. gelu is exact; W_o and b_o start uniform within
  1 / sqrt(D).
  """

  needs_length = True

  def __init__(
    self,
    dim: int,
    state_size: int,
    *,
    separate_steps: bool = False,
    dtype,
    param_dtype,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.state_size = state_size
    self.log_dt = log_steps(dim, param_dtype, rngs, separate=separate_steps)
    self.skip = normal((dim,), 1.0, param_dtype, rngs)
    init = uniform_fan_in(dim)
    self.o_proj = Linear(
      dim,
      2 * dim,
      kernel_init=init,
      bias_init=init,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )

  def _init_state(self, B):
    return empty_state(B, self.dim, self.state_size)

  def _mix(self, x, state, segment_ids):
    h = None if state is None else to_complex(state)
    y, h = self._filter(x.astype(self.dtype), h, segment_ids)
    y = exact_gelu(wide(y)).astype(self.dtype)
    value, gate = jnp.split(self.o_proj(y), 2, axis=-1)
    return (value * jax.nn.sigmoid(gate)).astype(self.dtype), from_complex(h)

  def _filter(self, x: jax.Array, h: jax.Array | None, segment_ids) -> tuple[jax.Array, jax.Array]:
    """Returns y [B, T, D] and h [B, D, N] after the last token, given x [B, T, D] and h before."""
    raise NotImplementedError

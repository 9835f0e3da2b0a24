"""What state spaces with one input and one output per channel share: S4, S4D, DSS."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_call, check_positive
from lnssm_jax.mixers.complex_state import ComplexState, empty_state, from_complex, to_complex
from lnssm_jax.mixers.initializers import uniform_fan_in
from lnssm_jax.mixers.layers import exact_gelu, linear, wide


def pairs_of(state_dim: int) -> int:
  """N / 2, or raises `ValueError` if N = `state_dim` is odd."""
  if check_positive("state_dim", state_dim) % 2:
    raise ValueError(
      f"state_dim={state_dim} is odd; complex numbers come in pairs, so use an even."
    )
  return state_dim // 2


def log_steps(size: int, param_dtype, rngs: nnx.Rngs) -> nnx.Param:
  """log(dt) [size], dt log-uniform between 0.001 and 0.1."""
  steps = jax.random.uniform(rngs.params(), (size,), jnp.float32, math.log(1e-3), math.log(0.1))
  return nnx.Param(steps.astype(param_dtype))


def normal(shape, deviation, param_dtype, rngs: nnx.Rngs) -> nnx.Param:
  """Normal numbers of this shape, with this standard deviation."""
  values = deviation * jax.random.normal(rngs.params(), shape, jnp.float32)
  return nnx.Param(values.astype(param_dtype))


class SingleInput(nnx.Module):
  """A state space of N numbers for each channel, then gelu and a gated linear layer."""

  def _build(self, dim: int, state_size: int, *, dtype, param_dtype, rngs: nnx.Rngs):
    self.dim, self.dtype, self.state_size = dim, jnp.dtype(dtype), state_size
    self.log_dt = log_steps(dim, param_dtype, rngs)
    self.skip = normal((dim,), 1.0, param_dtype, rngs)
    init = uniform_fan_in(dim)
    self.o_proj = linear(dim, 2 * dim, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    self.o_bias = nnx.Param(init(rngs.params(), (2 * dim,), param_dtype))

  def init_state(self, batch_size: int) -> ComplexState:
    """The state before the first token: zeros, [B, D, N]."""
    return empty_state(check_positive("batch_size", batch_size), self.dim, self.state_size)

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: ComplexState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, ComplexState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    h = None if state is None else to_complex(state)
    y, h = self._filter(x.astype(self.dtype), h, segment_ids)
    y = exact_gelu(wide(y)).astype(self.dtype)
    value, gate = jnp.split(wide(self.o_proj(y)) + wide(self.o_bias[...]), 2, axis=-1)
    return (value * jax.nn.sigmoid(gate)).astype(self.dtype), from_complex(h)

  def _filter(self, x: jax.Array, h: jax.Array | None, segment_ids) -> tuple[jax.Array, jax.Array]:
    """(y [B, T, D], h [B, D, N] after the last step) for x [B, T, D] and the h before it."""
    raise NotImplementedError

"""Complex states as pairs of float32 arrays, the dtype of every other state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ComplexState(NamedTuple):
  """What a complex recurrence remembers: h = real + i imag."""

  real: jax.Array  # [B, ...] float32
  imag: jax.Array  # [B, ...] float32


def empty_state(*shape: int) -> ComplexState:
  """The state before the first token: zeros."""
  return ComplexState(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


def to_complex(state: ComplexState) -> jax.Array:
  """The complex array of a state."""
  return jax.lax.complex(state.real, state.imag)


def from_complex(h: jax.Array) -> ComplexState:
  """The state of a complex array."""
  return ComplexState(h.real, h.imag)

"""Complex states as pairs of float32 arrays, the dtype of every other state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.states import register_state


@register_state
class ComplexState(NamedTuple):
  """State of a complex recurrence, h = real + i imag."""

  real: jax.Array  # [B, ...] float32
  imag: jax.Array  # [B, ...] float32


def empty_state(*shape: int) -> ComplexState:
  """Returns zeros."""
  return ComplexState(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


def to_complex(state: ComplexState) -> jax.Array:
  """Returns the state as a complex array."""
  return jax.lax.complex(state.real, state.imag)


def from_complex(h: jax.Array) -> ComplexState:
  """Returns a complex array as a state."""
  return ComplexState(h.real, h.imag)

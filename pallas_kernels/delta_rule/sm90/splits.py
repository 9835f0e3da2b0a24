"""A sequence in splits that run at the same time: the states that enter them, and cotangents."""

import jax
import jax.numpy as jnp
from jax import lax


def entering_states(maps: jax.Array, initial: jax.Array | None) -> jax.Array:
  """[B, H, P, V, K] float32: the state that enters each split of a sequence.

  Args:
    maps: [B, H, P, K + V, K] float32, of `recurrence.split_maps`.
    initial: [B, H, V, K] float32, or None for zeros.
  """
  K = maps.shape[-1]
  M, E = maps[:, :, :, :K], maps[:, :, :, K:]
  state = jnp.zeros_like(E[:, :, 0]) if initial is None else initial
  entering = [state]
  for p in range(maps.shape[2] - 1):
    state = E[:, :, p] if p == 0 and initial is None else _product(state, M[:, :, p]) + E[:, :, p]
    entering.append(state)
  return jnp.stack(entering, axis=2)


def leaving_cotangents(maps: jax.Array, added: jax.Array, d_last: jax.Array | None) -> jax.Array:
  """[B, H, P, V, K] float32: the cotangent of the state that leaves each split.

  Args:
    maps: [B, H, P, K + V, K] float32, of `recurrence.split_maps`.
    added: [B, H, P, V, K] float32: cotangents of the states that enter the splits, if those of the
      states that leave them were zero.
    d_last: [B, H, V, K] float32: of the last state, or None for zeros.
  """
  K, P = maps.shape[-1], maps.shape[2]
  M = maps[:, :, :, :K].swapaxes(-1, -2)
  adjoint = jnp.zeros_like(added[:, :, 0]) if d_last is None else d_last
  leaving = [adjoint]
  for p in range(P - 1, 0, -1):
    adjoint = _product(adjoint, M[:, :, p]) + added[:, :, p]
    leaving.append(adjoint)
  return jnp.stack(leaving[::-1], axis=2)


def _product(a, b):
  return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)

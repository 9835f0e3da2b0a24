"""Layers with a greatest length: what happens to sequences that are longer."""

import jax
import jax.numpy as jnp
import numpy as np


def check_capacity(
  name: str, length: int, position, segment_ids, max_length: int, axis_name: str | None = None
) -> None:
  """Raises `ValueError` where it is known that a sequence gets longer than `max_length`.

  Unknown is it inside `jit`, where `position` [B] (the steps before these `length`, or None) has no
  value yet, and with segments. There `nan_beyond` marks what would be wrong. `length` is that of a
  part where the sequence is divided over the mesh axis `axis_name`.
  """
  if segment_ids is not None or isinstance(position, jax.core.Tracer):
    return
  length *= 1 if axis_name is None else jax.lax.axis_size(axis_name)
  before = 0 if position is None else int(np.max(np.asarray(position)))
  if before + length > max_length:
    raise ValueError(
      f"{name}: x has {length} steps after {before} others of its sequence, which is more than "
      f"max_length={max_length}; build the layer with max_length of at least {before + length}."
    )


def nan_beyond(y: jax.Array, positions: jax.Array, max_length: int) -> jax.Array:
  """y [B, T, ...] with NaN at the steps whose position [B, T] in the sequence is too large."""
  inside = (positions < max_length).reshape(*positions.shape, *(1,) * (y.ndim - 2))
  return jnp.where(inside, y, jnp.nan)

"""Mixers with a maximum length: errors and NaN for longer sequences."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim


def check_capacity(
  name: str, length: int, position, segment_ids, max_length: int, axis_name: str | None = None
) -> None:
  """Raises `ValueError` where a sequence is known to exceed `max_length`.

  Under `jit` `position` [B] (the tokens before these `length`, or None) is traced, and with
  segments the lengths are values: then the check is skipped, and `nan_beyond` marks the outputs
  past `max_length`; likewise for a `length` that is a symbol of `jax.export`. It is that of a shard
  where time is sharded over `axis_name`.
  """
  unknown = is_symbolic_dim(length) or isinstance(position, jax.core.Tracer)
  if segment_ids is not None or unknown:
    return
  length *= 1 if axis_name is None else jax.lax.axis_size(axis_name)
  before = 0 if position is None else int(np.max(np.asarray(position)))
  if before + length > max_length:
    raise ValueError(
      f"{name}: x has {length} tokens after {before} others of its sequence, which is more than "
      f"max_length={max_length}; build the layer with max_length of at least {before + length}."
    )


def nan_beyond(y: jax.Array, positions: jax.Array, max_length: int) -> jax.Array:
  """Returns y [B, T, ...] with NaN where the position [B, T] is `max_length` or more."""
  inside = (positions < max_length).reshape(*positions.shape, *(1,) * (y.ndim - 2))
  return jnp.where(inside, y, jnp.nan)

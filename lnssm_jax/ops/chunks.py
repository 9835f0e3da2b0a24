"""Cutting heads and segments into chunks, `[N, B, H, C, X]`: N chunks of C steps; and back."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Segments(NamedTuple):
  """Which segment each step, and each border between chunks, belongs to."""

  step: jax.Array  # [N, B, 1, C]
  entering: jax.Array  # [N, B, 1, 1]: that of the state that enters the chunk
  leaving: jax.Array  # [N, B, 1, 1]: that of the chunk's last step


def next_power_of_two(n: int) -> int:
  """The smallest power of two that is at least n."""
  return 1 << (n - 1).bit_length()


def chunk(x: jax.Array, size: int) -> jax.Array:
  """[B, T, H, X] -> [N, B, H, C, X], zeros after the last step."""
  B, T, H, X = x.shape
  x = jnp.pad(x, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
  return x.reshape(B, -1, size, H, X).transpose(1, 0, 3, 2, 4)


def split_segments(segments: jax.Array | None, size: int) -> Segments | None:
  """[B, T], counting from 0; the steps after the last belong to the last segment."""
  if segments is None:
    return None
  step = jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % size)), mode="edge")
  step = step.reshape(segments.shape[0], -1, size).transpose(1, 0, 2)[:, :, None]
  leaving = step[..., -1:]
  entering = jnp.concatenate([jnp.zeros_like(leaving[:1]), leaving[:-1]])
  return Segments(step, entering, leaving)


def join(x: jax.Array, length: int) -> jax.Array:
  """[N, B, H, C, X] -> [B, T, H, X]."""
  N, B, H, C, X = x.shape
  return x.transpose(1, 0, 3, 2, 4).reshape(B, N * C, H, X)[:, :length]

"""Vectors of a chunk for decays that all key channels share, made outside the kernels.

They are small ([B, H, T] at most), so XLA makes and differentiates them.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.tensor_core import CHUNK

# exp(-80) = 2e-35: below it nothing is left that float32 sums would notice.
_SMALLEST = -80.0


def chunk_tables(log_decay, reach, length, padded):
  """Tables for `outputs.scalar_outputs` and the kernels of its gradient.

  Args:
    log_decay: [1, 1, H] or [B, T, H] float32.
    reach: [2, B, T] float32 (see `reaching`) or None.
    length, padded: steps without and with padding, `padded` a multiple of the chunk.

  Returns:
    cumulative, before, after [B|1, H, T|C] and decay [B|1, H, N|1]; the small sizes where all
    chunks are alike.
  """
  C = CHUNK
  log_decay = jnp.maximum(log_decay, _SMALLEST).transpose(0, 2, 1)
  rows, H, steps = log_decay.shape
  if steps == 1:  # sums are counts
    steps = C if length == padded and reach is None else padded
    i = jnp.arange(steps).reshape(-1, C)
    first = i[:, :1]
    stop = jnp.minimum(first + C, length)
    so_far = jnp.clip(stop - first, 0, i + 1 - first)  # none in a chunk of padding
    cumulative = so_far * log_decay[..., None]
    later = jnp.maximum(stop - 1 - i, 0) * log_decay[..., None]
    whole = so_far[:, -1] * log_decay
  else:
    steps = padded
    chunks = jnp.pad(log_decay, ((0, 0), (0, 0), (0, padded - length))).reshape(rows, H, -1, C)
    cumulative = jnp.cumsum(chunks, axis=-1)
    from_end = lax.cumsum(chunks, axis=3, reverse=True)
    later = jnp.concatenate([from_end[..., 1:], jnp.zeros_like(from_end[..., :1])], axis=-1)
    whole = cumulative[..., -1]
  cumulative, later = cumulative.reshape(rows, H, steps), later.reshape(rows, H, steps)
  before, after, decay = jnp.exp(cumulative), jnp.exp(later), jnp.exp(whole)
  if reach is not None:
    sees, reaches = reach[:, :, None]
    before, after = before * sees, after * reaches
    decay = decay * passing(reach)[:, None]
  return cumulative, before, after, decay


def reaching(segments, padded):
  """[2, B, T] float32: whether a step sees the state that enters its chunk (the segment of the step
  before the chunk), and whether it reaches the state that leaves (the segment of the last step).

  Args:
    segments: [B, T] int32, counted from 0, padded with each row's last.
  """
  chunks = segments.reshape(segments.shape[0], -1, CHUNK)
  leaving = chunks[:, :, -1:]
  entering = jnp.concatenate([jnp.zeros_like(leaving[:, :1]), leaving[:, :-1]], axis=1)
  reach = jnp.stack([chunks == entering, chunks == leaving])
  return reach.reshape(2, -1, padded).astype(jnp.float32)


def passing(reach):
  """[B, N] float32: whether a state passes a chunk, which then lies in one segment."""
  by_chunk = reach.reshape(*reach.shape[:2], -1, CHUNK)
  return by_chunk[0, :, :, -1]  # the last step sees the entering state

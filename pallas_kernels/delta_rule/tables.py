"""Vectors of each chunk, made outside the kernels: they are small, so XLA makes and differentiates
them."""

import jax.numpy as jnp

from pallas_kernels.linear_attention.tables import chunk_tables
from pallas_kernels.tensor_core import CHUNK

# Which row of a chunk's table holds what.
BEFORE, AFTER, RATE, DECAY, CUMULATIVE = range(5)
ROWS = 5


def make_vectors(beta, log_decay, reach, length, padded):
  """[B, H, N, ROWS, C] float32: what each step of a chunk has of

  BEFORE: what is left of the entering state; AFTER: what the leaving state keeps; RATE: beta;
  DECAY: what the chunk leaves of the state, the same number in every column; CUMULATIVE: the log
  decays summed from the chunk's start.

  Args:
    beta, log_decay: [B, length, H] float32.
    reach: [2, B, padded] float32 (`linear_attention.tables.reaching`) or None.
  """
  B, _, H = beta.shape
  cumulative, before, after, decay = chunk_tables(log_decay, reach, length, padded)
  beta = jnp.pad(beta.transpose(0, 2, 1), ((0, 0), (0, 0), (0, padded - length)))
  cut = lambda x: jnp.broadcast_to(x, (B, H, padded)).reshape(B, H, -1, CHUNK)
  decay = jnp.broadcast_to(decay[..., None], (B, H, padded // CHUNK, CHUNK))
  return jnp.stack([cut(before), cut(after), cut(beta), decay, cut(cumulative)], axis=3)

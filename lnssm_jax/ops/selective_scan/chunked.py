"""The recurrence as an associative scan, over all tokens or chunk by chunk.

README.md has the derivation, `ops/core/diagonal_chunks.py` the machinery.
"""

import jax.numpy as jnp

from lnssm_jax.ops.core import diagonal_chunks
from lnssm_jax.ops.core.channel_states import Options
from lnssm_jax.ops.core.diagonal_chunks import DEFAULT_CHUNK_SIZE, Recurrence
from lnssm_jax.ops.core.precision import widen
from lnssm_jax.ops.selective_scan.types import Inputs, SelectiveState


def chunked(inputs: Inputs, options: Options):
  """Chunk by chunk, in linear time."""
  return _scan(inputs, options.chunk_size or DEFAULT_CHUNK_SIZE)


def associative(inputs: Inputs, options: Options):
  """One associative scan over all tokens: depth log T, but [B, T, D, N] in memory."""
  del options
  return _scan(inputs, None)


def _scan(inputs, chunk_size):
  x, dt, a, b, c, skip, state, segments = inputs
  recurrence = Recurrence(_update, _read)
  tokens, parameters = (x, dt, b, c), (a, skip)
  out, h = diagonal_chunks.scan(
    recurrence, tokens, parameters, state.h, segments, chunk_size=chunk_size
  )
  return out, SelectiveState(h)


def _update(tokens, parameters):
  """A = exp(dt a), 1 - A and (dt x) b^T, [B, C, D, N] each."""
  x, dt, b, _ = widen(*tokens)
  a, _ = parameters
  log_decay = dt[..., None] * a
  return jnp.exp(log_decay), -jnp.expm1(log_decay), (dt * x)[..., None] * b[..., None, :]


def _read(h, tokens, parameters):
  x, _, _, c = widen(*tokens)
  _, skip = parameters
  out = jnp.sum(h * c[..., None, :], axis=-1) + skip * x
  return out.astype(tokens[0].dtype)

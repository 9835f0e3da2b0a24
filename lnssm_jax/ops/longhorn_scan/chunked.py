"""The recurrence chunk by chunk, or as an associative scan over all tokens.

README.md has the derivation, `ops/core/diagonal_chunks.py` the machinery.
"""

import jax.numpy as jnp

from lnssm_jax.ops.core import diagonal_chunks
from lnssm_jax.ops.core.channel_states import Options
from lnssm_jax.ops.core.diagonal_chunks import DEFAULT_CHUNK_SIZE, Recurrence
from lnssm_jax.ops.core.precision import widen
from lnssm_jax.ops.longhorn_scan.gains import gain_and_decay
from lnssm_jax.ops.longhorn_scan.types import Inputs, LonghornState


def chunked(inputs: Inputs, options: Options):
  """Chunk by chunk, in linear time."""
  return _scan(inputs, options.chunk_size or DEFAULT_CHUNK_SIZE)


def associative(inputs: Inputs, options: Options):
  """One associative scan over all tokens: depth log T, but [B, T, D, N] in memory."""
  del options
  return _scan(inputs, None)


def _scan(inputs, chunk_size):
  x, beta, k, q, skip, state, segments, *_ = inputs
  recurrence, tokens = Recurrence(_update, _read), (x, beta, k, q)
  out, h = diagonal_chunks.scan(recurrence, tokens, skip, state.h, segments, chunk_size=chunk_size)
  return out, LonghornState(h)


def _update(tokens, skip):
  """A = 1 - ε k², ε k² and (ε x) kᵀ, [B, C, D, N] each."""
  del skip
  x, beta, k, _ = widen(*tokens)
  gain, decay = gain_and_decay(beta, k)
  lost = gain[..., None] * (k * k)[..., None, :]
  return decay, lost, (gain * x)[..., None] * k[..., None, :]


def _read(h, tokens, skip):
  x, _, _, q = widen(*tokens)
  out = jnp.sum(h * q[..., None, :], axis=-1) + skip * x
  return out.astype(tokens[0].dtype)

"""The recurrence as an associative scan, over all steps or over those of one chunk at a time.

The derivation is in README.md beside this file, the machinery in `ops/diagonal_chunks.py`.
"""

import jax.numpy as jnp

from lnssm_jax.ops import diagonal_chunks
from lnssm_jax.ops.diagonal_chunks import DEFAULT_CHUNK_SIZE, Recurrence, widen
from lnssm_jax.ops.longhorn_scan.gains import gain_and_decay
from lnssm_jax.ops.longhorn_scan.state import LonghornState


def chunked(x, beta, k, q, skip, state, segments, *, chunk_size=None):
  """The chunked form; arguments as in `reference.py`."""
  return _scan(x, beta, k, q, skip, state, segments, chunk_size or DEFAULT_CHUNK_SIZE)


def associative(x, beta, k, q, skip, state, segments, *, chunk_size=None):
  """One associative scan over all steps: depth log T, but memory [B, T, D, N]."""
  del chunk_size
  return _scan(x, beta, k, q, skip, state, segments, None)


def _scan(x, beta, k, q, skip, state, segments, chunk_size):
  out, memory = diagonal_chunks.scan(
    Recurrence(_update, _read),
    (x, beta, k, q),
    skip,
    state.memory,
    segments,
    chunk_size=chunk_size,
  )
  return out, LonghornState(memory)


def _update(steps, skip):
  """A = 1 - ε k², ε k² and (ε x) kᵀ, [B, C, D, N] each."""
  del skip
  x, beta, k, _ = widen(*steps)
  gain, decay = gain_and_decay(beta, k)
  lost = gain[..., None] * (k * k)[..., None, :]
  return decay, lost, (gain * x)[..., None] * k[..., None, :]


def _read(memory, steps, skip):
  x, _, _, q = widen(*steps)
  out = jnp.sum(memory * q[..., None, :], axis=-1) + skip * x
  return out.astype(steps[0].dtype)

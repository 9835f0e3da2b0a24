"""The recurrence as an associative scan, over all steps or over those of one chunk at a time.

The derivation is in README.md beside this file, the machinery in `ops/diagonal_chunks.py`.
"""

import jax.numpy as jnp

from lnssm_jax.ops import diagonal_chunks
from lnssm_jax.ops.diagonal_chunks import DEFAULT_CHUNK_SIZE, Recurrence, widen
from lnssm_jax.ops.selective_scan.state import SelectiveState


def chunked(x, dt, a, b, c, skip, state, segments, *, chunk_size=None):
  """The chunked form; arguments as in `reference.py`."""
  return _scan(x, dt, a, b, c, skip, state, segments, chunk_size or DEFAULT_CHUNK_SIZE)


def associative(x, dt, a, b, c, skip, state, segments, *, chunk_size=None):
  """One associative scan over all steps: depth log T, but memory [B, T, D, N]."""
  del chunk_size
  return _scan(x, dt, a, b, c, skip, state, segments, None)


def _scan(x, dt, a, b, c, skip, state, segments, chunk_size):
  out, ssm = diagonal_chunks.scan(
    Recurrence(_update, _read),
    (x, dt, b, c),
    (a, skip),
    state.ssm,
    segments,
    chunk_size=chunk_size,
  )
  return out, SelectiveState(ssm)


def _update(steps, parameters):
  """A = exp(dt a), 1 - A and (dt x) bᵀ, [B, C, D, N] each."""
  x, dt, b, _ = widen(*steps)
  a, _ = parameters
  log_decay = dt[..., None] * a
  return jnp.exp(log_decay), -jnp.expm1(log_decay), (dt * x)[..., None] * b[..., None, :]


def _read(ssm, steps, parameters):
  x, _, _, c = widen(*steps)
  _, skip = parameters
  out = jnp.sum(ssm * c[..., None, :], axis=-1) + skip * x
  return out.astype(steps[0].dtype)

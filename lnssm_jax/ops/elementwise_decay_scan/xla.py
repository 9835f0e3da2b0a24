"""The recurrence as an associative scan, over all steps or over those of one chunk at a time.

The derivation is in README.md beside this file, the machinery in `ops/diagonal_chunks.py`.
"""

import functools

import jax.numpy as jnp

from lnssm_jax.ops import diagonal_chunks
from lnssm_jax.ops.diagonal_chunks import DEFAULT_CHUNK_SIZE, Recurrence, widen
from lnssm_jax.ops.elementwise_decay_scan.state import ElementwiseDecayState


def chunked(q, k, v, log_decay, state, segments, *, chunk_size=None):
  """The chunked form; arguments as in `reference.py`."""
  return _scan(q, k, v, log_decay, state, segments, chunk_size or DEFAULT_CHUNK_SIZE)


def associative(q, k, v, log_decay, state, segments, *, chunk_size=None):
  """One associative scan over all steps: depth log T, but memory [B, T, H, K, V]."""
  del chunk_size
  return _scan(q, k, v, log_decay, state, segments, None)


def _scan(q, k, v, log_decay, state, segments, chunk_size):
  recurrence = Recurrence(functools.partial(_update, log_decay.make), _read)
  steps, parameters = (q, k, v, log_decay.steps), log_decay.parameters
  out, kv = diagonal_chunks.scan(
    recurrence, steps, parameters, state.kv, segments, chunk_size=chunk_size
  )
  return out, ElementwiseDecayState(kv)


def _update(make, steps, parameters):
  """A = exp(log decay), 1 - A and k vᵀ, [B, C, H, K, V] each."""
  _, k, v, decay_steps = steps
  log_decay, k, v = widen(make(decay_steps, parameters), k, v)
  added = k[..., :, None] * v[..., None, :]
  decay, lost = (
    jnp.broadcast_to(x, added.shape) for x in (jnp.exp(log_decay), -jnp.expm1(log_decay))
  )
  return decay, lost, added


def _read(kv, steps, parameters):
  del parameters
  q, _, v, _ = steps
  return jnp.sum(kv * q[..., :, None], axis=-2).astype(v.dtype)

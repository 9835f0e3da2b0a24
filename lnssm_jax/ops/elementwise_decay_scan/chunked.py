"""The recurrence chunk by chunk, or as an associative scan over all tokens.

The derivation is in README.md, the machinery in `ops/core/diagonal_chunks.py`.
"""

import functools

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core import diagonal_chunks
from lnssm_jax.ops.core.diagonal_chunks import Recurrence
from lnssm_jax.ops.core.precision import wide, widen
from lnssm_jax.ops.elementwise_decay_scan.types import ElementwiseDecayState, Inputs, Options


def chunked(inputs: Inputs, options: Options) -> tuple[jax.Array, ElementwiseDecayState]:
  """The chunked form."""
  scan = functools.partial(diagonal_chunks.scan, chunk_size=options.chunk_size)
  return _run(scan, inputs)


def associative(inputs: Inputs, options: Options) -> tuple[jax.Array, ElementwiseDecayState]:
  """One associative scan over all tokens: depth log T, but memory [B, T, H, K, V]."""
  del options
  return _run(diagonal_chunks.associative, inputs)


def _run(scan, inputs):
  q, k, v, log_decay, weight, state, segments = inputs
  recurrence = Recurrence(functools.partial(_update, log_decay.make), _read)
  steps, parameters = (q, k, v, log_decay.steps), (log_decay.parameters, weight)
  out, kv = scan(recurrence, steps, parameters, state.kv, segments)
  return out, ElementwiseDecayState(kv)


def _update(make, steps, parameters):
  """A = exp(log decay), 1 - A and k vᵀ, [B, C, H, K, V] each."""
  _, k, v, decay_steps = steps
  log_decay, k, v = widen(make(decay_steps, parameters[0]), k, v)
  added = k[..., :, None] * v[..., None, :]
  decay, lost = (
    jnp.broadcast_to(x, added.shape) for x in (jnp.exp(log_decay), -jnp.expm1(log_decay))
  )
  return decay, lost, added


def _read(kv, steps, parameters):
  q, _, v, _ = steps
  _, weight = parameters
  kv = wide(kv) if weight is None else weight * kv
  return jnp.sum(kv * q[..., :, None], axis=-2).astype(v.dtype)

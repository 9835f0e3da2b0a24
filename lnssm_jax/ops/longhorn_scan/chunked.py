"""The recurrence chunk by chunk, or as an associative scan over all tokens.

README.md has the derivation, `ops/core/diagonal_chunks.py` the machinery.
"""

import functools

import jax.numpy as jnp

from lnssm_jax.ops.core import diagonal_chunks
from lnssm_jax.ops.core.channel_states import Options
from lnssm_jax.ops.core.diagonal_chunks import Recurrence
from lnssm_jax.ops.core.precision import widen
from lnssm_jax.ops.longhorn_scan.gains import gain_and_decay
from lnssm_jax.ops.longhorn_scan.types import Inputs, LonghornState


def chunked(inputs: Inputs, options: Options):
  """Chunk by chunk, in linear time."""
  scan = functools.partial(diagonal_chunks.scan, chunk_size=options.chunk_size)
  return _run(scan, inputs)


def associative(inputs: Inputs, options: Options):
  """One associative scan over all tokens: depth log T, but [B, T, D, N] in memory."""
  del options
  return _run(diagonal_chunks.associative, inputs)


def _run(scan, inputs):
  """With states [N, D]: sums over channels and over N both read along the channels."""
  x, beta, k, q, skip, state, segments, *_ = inputs
  tokens, h = (x, beta, k, q), jnp.swapaxes(state.h, 1, 2)
  out, h = scan(Recurrence(_update, _read), tokens, skip, h, segments)
  return out, LonghornState(jnp.swapaxes(h, 1, 2))


def _update(tokens, skip):
  """A = 1 - ε k², ε k² and k (ε x)ᵀ, [B, C, N, D] each."""
  del skip
  x, beta, k, _ = widen(*tokens)
  gain, decay = gain_and_decay(beta, k)
  lost = (k * k)[..., None] * gain[..., None, :]
  return jnp.swapaxes(decay, -1, -2), lost, k[..., None] * (gain * x)[..., None, :]


def _read(h, tokens, skip):
  h, x, _, _, q = widen(h, *tokens)
  out = jnp.sum(h * q[..., None], axis=-2) + skip * x
  return out.astype(tokens[0].dtype)

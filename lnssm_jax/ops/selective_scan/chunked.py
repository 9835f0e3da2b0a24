"""The recurrence chunk by chunk, as an associative scan over all tokens, or as matrix products.

README.md has the derivations, `ops/core/diagonal_chunks.py` the machinery of the scans.
"""

import functools

import jax.numpy as jnp

from lnssm_jax.ops.core import diagonal_chunks
from lnssm_jax.ops.core.channel_states import Options
from lnssm_jax.ops.core.diagonal_chunks import Recurrence
from lnssm_jax.ops.core.precision import widen
from lnssm_jax.ops.linear_attention import chunked as linear_attention
from lnssm_jax.ops.linear_attention import types as linear
from lnssm_jax.ops.selective_scan.types import Inputs, SelectiveState, has_shared_rates


def chunked(inputs: Inputs, options: Options):
  """Chunk by chunk, in linear time; several tokens with a rate per channel by matrix products."""
  if has_shared_rates(inputs) and inputs.x.shape[1] > 1:
    return _products(inputs, options)
  scan = functools.partial(diagonal_chunks.scan, chunk_size=options.chunk_size)
  return _run(scan, inputs)


def associative(inputs: Inputs, options: Options):
  """One associative scan over all tokens: depth log T, but [B, T, D, N] in memory."""
  del options
  return _run(diagonal_chunks.associative, inputs)


def _products(inputs, options):
  """Linear attention with a decay of values, which are the channels: S is transposed there."""
  x, dt, a, b, c, skip, state, segments, *_ = inputs
  x_wide, dt, b, c = widen(x, dt, b, c)
  head = lambda z: z[:, :, None]
  arguments = linear.Inputs(
    q=head(c),
    k=head(b),
    v=head(dt * x_wide),
    log_decay=jnp.zeros((1, 1, 1, 1), state.h.dtype),
    value_log_decay=head(dt * a[:, 0]),
    bonus=None,
    state=linear.LinearAttentionState(jnp.swapaxes(state.h, 1, 2)[:, None]),
    segments=segments,
  )
  static = linear.Options(normalize=False, scale=1.0, chunk_size=options.chunk_size)
  out, (kv, _) = linear_attention.chunked(arguments, static)
  out = out[:, :, 0] + skip * x_wide
  return out.astype(x.dtype), SelectiveState(jnp.swapaxes(kv[:, 0], 1, 2))


def _run(scan, inputs):
  """With states [N, D]: sums over channels and over N both read along the channels."""
  x, dt, a, b, c, skip, state, segments, *_ = inputs
  tokens, parameters, h = (x, dt, b, c), (a.T, skip), jnp.swapaxes(state.h, 1, 2)
  out, h = scan(Recurrence(_update, _read), tokens, parameters, h, segments)
  return out, SelectiveState(jnp.swapaxes(h, 1, 2))


def _update(tokens, parameters):
  """A = exp(dt a), 1 - A and b (dt x)^T, [B, C, N, D] each."""
  x, dt, b, _ = widen(*tokens)
  a, _ = parameters
  log_decay = dt[..., None, :] * a
  added = b[..., None] * (dt * x)[..., None, :]
  full = lambda z: jnp.broadcast_to(z, added.shape)  # of one rate per channel
  return full(jnp.exp(log_decay)), full(-jnp.expm1(log_decay)), added


def _read(h, tokens, parameters):
  h, x, _, _, c = widen(h, *tokens)
  _, skip = parameters
  out = jnp.sum(h * c[..., None], axis=-2) + skip * x
  return out.astype(tokens[0].dtype)

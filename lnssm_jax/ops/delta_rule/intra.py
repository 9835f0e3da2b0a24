"""The delta rule inside its chunks, for all chunks at once; `xla.py` connects them.

Shapes are `[N, B, H, C, X]`: N chunks of C steps. Every function also takes one chunk without the
leading axis, as the scans over chunks pass it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.chunks import Segments
from lnssm_jax.ops.decays import decayed
from lnssm_jax.ops.products import product


class Chunks(NamedTuple):
  """The inputs, cut into chunks."""

  q: jax.Array  # [N, B, H, C, K]
  k: jax.Array  # [N, B, H, C, K]
  erase_key: jax.Array  # [N, B, H, C, K]
  v: jax.Array  # [N, B, H, C, V]
  beta: jax.Array  # [N, B, H, C, 1 or V], float32
  log_decay: jax.Array  # [N, B, H, C], float32


class Updates(NamedTuple):
  """What a chunk does to a state S, given the corrections x = solve(gram, beta, v - read S):

  S -> exp(log_decay) S + write^T x.
  """

  gram: jax.Array  # [N, B, H, C, C], strictly lower: how a correction reaches a later old value
  beta: jax.Array  # [N, B, H, C, 1 or V]
  v: jax.Array  # [N, B, H, C, V]
  read: jax.Array  # [N, B, H, C, K]
  write: jax.Array  # [N, B, H, C, K]
  log_decay: jax.Array  # [N, B, H, 1, 1]


class Reads(NamedTuple):
  """The outputs, given S and x: queries S + scores x."""

  queries: jax.Array  # [N, B, H, C, K]
  scores: jax.Array  # [N, B, H, C, C]


def updates(chunks: Chunks, segments: Segments | None) -> Updates:
  """Everything about the change of the state that does not depend on the state."""
  sums = _log_weights(chunks.log_decay, segments)
  gram = product("...ik,...jk->...ij", chunks.erase_key, chunks.k, chunks.v.dtype)
  strictly_lower = jnp.tri(gram.shape[-1], k=-1, dtype=bool)
  gram = jnp.where(strictly_lower, gram * jnp.exp(sums.between), 0.0)
  acc = chunks.beta.dtype
  read = chunks.erase_key.astype(acc) * jnp.exp(sums.before)[..., None]
  write = chunks.k.astype(acc) * jnp.exp(sums.after)[..., None]
  log_decay = sums.total[..., None, None]
  return Updates(gram, chunks.beta, chunks.v.astype(acc), read, write, log_decay)


def reads(chunks: Chunks, segments: Segments | None) -> Reads:
  """Everything about the outputs that does not depend on the state."""
  sums = _log_weights(chunks.log_decay, segments)
  scores = product("...ik,...jk->...ij", chunks.q, chunks.k, chunks.v.dtype)
  queries = chunks.q.astype(chunks.beta.dtype) * jnp.exp(sums.before)[..., None]
  return Reads(queries, scores * jnp.exp(sums.between))


def advance(update: Updates, state, corrections, dtype):
  """The state after a chunk."""
  written = product("...ck,...cv->...kv", update.write, corrections, dtype)
  return decayed(update.log_decay, state) + written


def outputs(read: Reads, state, corrections, dtype):
  """S_t^T q_t [N, B, H, C, V]."""
  from_state = product("...ck,...kv->...cv", read.queries, state, dtype)
  return from_state + product("...ij,...jv->...iv", read.scores, corrections, dtype)


class _LogWeights(NamedTuple):
  """Sums of log decays, -inf where nothing passes. Each adds terms of one sign."""

  between: jax.Array  # [N, B, H, C, C]: of the steps after j up to i; -inf for j > i
  before: jax.Array  # [N, B, H, C]: from the chunk's start up to i
  after: jax.Array  # [N, B, H, C]: of the steps after j to the chunk's end
  total: jax.Array  # [N, B, H]


def _log_weights(log_decay, segments: Segments | None) -> _LogWeights:
  length = log_decay.shape[-1]
  steps = jnp.where(jnp.tri(length, k=-1, dtype=bool), log_decay[..., :, None], 0.0)
  between = jnp.cumsum(steps, axis=-2)
  before = log_decay[..., :1] + between[..., :, 0]
  after, total = between[..., -1, :], before[..., -1]
  between = jnp.where(jnp.tri(length, dtype=bool), between, -jnp.inf)
  if segments is not None:
    step, entering, leaving = segments
    between = jnp.where(step[..., :, None] == step[..., None, :], between, -jnp.inf)
    before = jnp.where(step == entering, before, -jnp.inf)
    after = jnp.where(step == leaving, after, -jnp.inf)
    total = jnp.where((entering == leaving)[..., 0], total, -jnp.inf)
  return _LogWeights(between, before, after, total)

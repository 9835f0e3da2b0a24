"""Linear attention in chunks: matrix products inside, a short scan over the states between.

The derivation, forward and backward, is in README.md beside this file. Two things decide how it is
written:

* Only sums of log decays over ranges of steps are exponentiated, each formed by adding terms of one
  sign. No difference of two cumulative sums is taken, so a decay of exp(-20), or of 0, costs no
  accuracy anywhere.
* The backward pass keeps the inputs and the states between chunks, and recomputes the rest (custom
  VJP).

Layout inside: `[N, B, H, C, X]`, N chunks of C steps; an axis of size 1 where a constant decay does
not depend on it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.checks import accumulation_dtype
from lnssm_jax.ops.chunks import chunk, join, next_power_of_two, split_segments
from lnssm_jax.ops.linear_attention import intra
from lnssm_jax.ops.linear_attention.state import LinearAttentionState

DEFAULT_CHUNK_SIZE = 64


class _Static(NamedTuple):
  """What the compiled program is specialised to."""

  normalize: bool
  scale: float
  chunk_size: int


class _Inputs(NamedTuple):
  """Everything that a gradient flows to, as `api.py` hands it over."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  log_decay: jax.Array
  value_log_decay: jax.Array | None
  bonus: jax.Array | None
  state: LinearAttentionState


def chunked(
  q,
  k,
  v,
  log_decay,
  value_log_decay,
  bonus,
  state,
  segments,
  *,
  normalize,
  scale,
  chunk_size=None,
  fresh=False,
):
  """The chunked form; arguments as in `reference.py`."""
  del fresh
  chunk_size = min(chunk_size or DEFAULT_CHUNK_SIZE, next_power_of_two(q.shape[1]))
  state = state if normalize else state._replace(key_sum=None)
  inputs = _Inputs(q, k, v, log_decay, value_log_decay, bonus, state)
  return _scan(_Static(normalize, scale, chunk_size), inputs, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(static, inputs, segments):
  return _forward(static, inputs, segments)[0]


def _forward(static, inputs, segments):
  """Returns (out, final state) and what the backward pass keeps."""
  chunks = _split(inputs, static.chunk_size)
  borders = split_segments(segments, static.chunk_size)
  summary = intra.summarize(chunks, borders, static.normalize)
  final, entering = _carry_states(summary, inputs.state)
  out, denominator = intra.outputs(chunks, borders, entering, static.normalize)
  length = inputs.q.shape[1]
  out = static.scale * join(out, length)
  if static.normalize:
    denominator = join(denominator[..., None], length)
    out = out / denominator
  out = out.astype(inputs.v.dtype)
  return (out, final), (inputs, segments, entering, out, denominator)


@jax.named_scope("linear_attention")
def _backward(static, kept, cotangents):
  inputs, segments, entering, out, denominator = kept
  d_out, d_final = cotangents
  acc = accumulation_dtype(inputs.q, inputs.k, inputs.v)
  d_out, d_denominator = d_out.astype(acc), None
  if static.normalize:
    # y = scale n / D: dn = scale dy / D, dD = -(dy . y) / D. Before padding: no padded row may
    # divide by its zero.
    d_denominator = -jnp.sum(d_out * out.astype(acc), axis=-1, keepdims=True) / denominator
    d_denominator = chunk(d_denominator, static.chunk_size)[..., 0]
    d_out = d_out / denominator
  d_out = static.scale * chunk(d_out, static.chunk_size)

  chunks, split_vjp = jax.vjp(lambda inputs: _split(inputs, static.chunk_size), inputs)
  borders = split_segments(segments, static.chunk_size)
  _, outputs_vjp = jax.vjp(
    lambda *args: intra.outputs(args[0], borders, args[1], static.normalize), chunks, entering
  )
  d_chunks, d_entering = outputs_vjp((d_out, d_denominator))
  summary, summarize_vjp = jax.vjp(
    lambda chunks: intra.summarize(chunks, borders, static.normalize), chunks
  )
  d_initial, leaving = _carry_adjoints(summary, d_entering, d_final)
  _, advance_vjp = jax.vjp(lambda summary: intra.advance(summary, entering), summary)
  (d_chunks_by_state,) = summarize_vjp(*advance_vjp(leaving))
  (d_inputs,) = split_vjp(jax.tree.map(jnp.add, d_chunks, d_chunks_by_state))
  no_gradient = None if segments is None else np.zeros(segments.shape, jax.dtypes.float0)
  return d_inputs._replace(state=d_initial), no_gradient


_scan.defvjp(_forward, _backward)


def _carry_states(summary: intra.Summary, initial: LinearAttentionState):
  """Runs the states through the chunks: the state after the last, and the one that enters each."""

  def step(state, summary_n):
    return intra.advance(summary_n, state), state

  final, entering = _scan_chunks(step, intra.State(*initial), summary)
  return LinearAttentionState(*final), entering


def _carry_adjoints(summary: intra.Summary, d_entering: intra.State, d_final):
  """Runs the adjoint states back: that of the initial state, and the one that leaves each chunk."""

  def step(adjoint, inputs):
    summary_n, d_entering_n = inputs
    zeros = jax.tree.map(jnp.zeros_like, adjoint)
    decayed = intra.advance(summary_n._replace(added=zeros), adjoint)  # diagonal: its own transpose
    return jax.tree.map(jnp.add, decayed, d_entering_n), adjoint

  d_initial, leaving = _scan_chunks(
    step, intra.State(*d_final), (summary, d_entering), reverse=True
  )
  return LinearAttentionState(*d_initial), leaving


def _scan_chunks(step, carry, xs, *, reverse=False):
  """`lax.scan` over the leading axis; arrays of size 1 there are the same for every chunk."""
  leaves, treedef = jax.tree.flatten(xs)
  length = max(x.shape[0] for x in leaves)
  constant = [x[0] if x.shape[0] == 1 else None for x in leaves]
  varying = [x for x in leaves if x.shape[0] != 1]
  if length == 1:
    carry, y = step(carry, jax.tree.unflatten(treedef, constant))
    return carry, jax.tree.map(lambda x: x[None], y)

  def body(carry, varying_n):
    rest = iter(varying_n)
    return step(
      carry, jax.tree.unflatten(treedef, [next(rest) if c is None else c for c in constant])
    )

  return jax.lax.scan(body, carry, varying, reverse=reverse)


def _split(inputs: _Inputs, size: int) -> intra.Chunks:
  length = inputs.q.shape[1]
  bonus = inputs.bonus
  return intra.Chunks(
    *(chunk(x, size) for x in (inputs.q, inputs.k, inputs.v)),
    _chunk_decay(inputs.log_decay, length, size),
    _chunk_decay(inputs.value_log_decay, length, size),
    None if bonus is None else bonus.astype(inputs.log_decay.dtype)[:, None, :],
  )


def _chunk_decay(decay, length, size):
  """Like `chunk`, keeping axes of size 1; a constant decay spans the steps of one chunk only."""
  if decay is None:
    return None
  B, T, H, X = decay.shape
  if T == 1 and length % size == 0:
    return jnp.broadcast_to(decay.transpose(1, 0, 2, 3)[:, :, :, None], (1, B, H, size, X))
  # The steps after the last must not decay the final state, so the last chunk differs from the
  # others.
  return chunk(jnp.broadcast_to(decay, (B, length, H, X)), size)

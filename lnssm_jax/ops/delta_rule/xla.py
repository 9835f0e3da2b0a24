"""The delta rule in chunks: one triangular system a chunk, a short scan over the states between.

The derivation, forward and backward, is in README.md beside this file. The backward pass keeps the
inputs and the states that enter the chunks, and recomputes the rest (custom VJP).

With `beta` shared by the value columns, the solution is affine in the entering state with one
matrix for all columns, so that the systems of all chunks are solved at once and the scan over
chunks is left with two matrix products. With one `beta` per column that matrix would differ from
column to column; then the scan solves each chunk's systems, in small chunks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.checks import accumulation_dtype
from lnssm_jax.ops.chunks import chunk, join, next_power_of_two, split_segments
from lnssm_jax.ops.decays import decayed
from lnssm_jax.ops.delta_rule import intra
from lnssm_jax.ops.delta_rule.solve import solve, transposed_solve
from lnssm_jax.ops.delta_rule.state import DeltaRuleState
from lnssm_jax.ops.products import product

DEFAULT_CHUNK_SIZE = 64
DEFAULT_CHUNK_SIZE_PER_COLUMN = 16


class _Inputs(NamedTuple):
  """Everything that a gradient flows to, as `api.py` hands it over."""

  q: jax.Array
  k: jax.Array
  erase_key: jax.Array
  v: jax.Array
  beta: jax.Array
  log_decay: jax.Array
  kv: jax.Array


def chunked(q, k, v, beta, log_decay, erase_key, state, segments, *, scale, chunk_size=None):
  """The chunked form; arguments as in `reference.py`."""
  default = DEFAULT_CHUNK_SIZE if beta.shape[-1] == 1 else DEFAULT_CHUNK_SIZE_PER_COLUMN
  chunk_size = min(chunk_size or default, next_power_of_two(q.shape[1]))
  out, kv = _scan(
    scale, chunk_size, _Inputs(q, k, erase_key, v, beta, log_decay, state.kv), segments
  )
  return out, DeltaRuleState(kv)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scan(scale, chunk_size, inputs, segments):
  return _forward(scale, chunk_size, inputs, segments)[0]


def _forward(scale, chunk_size, inputs, segments):
  """Returns (out, final state) and what the backward pass keeps."""
  chunks = _split(inputs, chunk_size)
  borders = split_segments(segments, chunk_size)
  dtype = inputs.v.dtype
  final, entering, corrections = _carry_states(intra.updates(chunks, borders), inputs.kv, dtype)
  out = intra.outputs(intra.reads(chunks, borders), entering, corrections, dtype)
  out = (scale * join(out, inputs.q.shape[1])).astype(dtype)
  return (out, final), (inputs, segments, entering)


@jax.named_scope("delta_rule")
def _backward(scale, chunk_size, kept, cotangents):
  inputs, segments, entering = kept
  d_out, d_final = cotangents
  dtype = inputs.v.dtype
  chunks, split_vjp = jax.vjp(lambda inputs: _split(inputs, chunk_size), inputs)
  borders = split_segments(segments, chunk_size)
  update, updates_vjp = jax.vjp(lambda chunks: intra.updates(chunks, borders), chunks)
  corrections, corrections_vjp = jax.vjp(lambda u: _corrections(u, entering, dtype), update)

  def outputs(chunks, state, corrections):
    return intra.outputs(intra.reads(chunks, borders), state, corrections, dtype)

  _, outputs_vjp = jax.vjp(outputs, chunks, entering, corrections)
  d_out = scale * chunk(d_out.astype(accumulation_dtype(inputs.q, inputs.k, inputs.v)), chunk_size)
  d_chunks, d_entering, d_corrections = outputs_vjp(d_out)
  d_initial, leaving, d_corrections = _carry_adjoints(
    update, d_entering, d_corrections, d_final, dtype
  )
  _, advance_vjp = jax.vjp(lambda u: intra.advance(u, entering, corrections, dtype), update)
  d_update = jax.tree.map(jnp.add, advance_vjp(leaving)[0], corrections_vjp(d_corrections)[0])
  (d_inputs,) = split_vjp(jax.tree.map(jnp.add, d_chunks, updates_vjp(d_update)[0]))
  no_gradient = None if segments is None else np.zeros(segments.shape, jax.dtypes.float0)
  return d_inputs._replace(kv=d_initial), no_gradient


_scan.defvjp(_forward, _backward)


def _corrections(update: intra.Updates, state, dtype):
  """beta_t (v_t - the value that the erase key reads before step t), for every step."""
  old = product("...ck,...kv->...cv", update.read, state, dtype)
  return solve(update.gram, update.beta, update.v - old)


def _carry_states(update: intra.Updates, initial, dtype):
  """Runs the states through the chunks: the last state, those that enter, and the corrections."""
  if update.beta.shape[-1] == 1:
    V = update.v.shape[-1]
    both = solve(update.gram, update.beta, jnp.concatenate([update.v, update.read], -1))
    written, erased = both[..., :V], both[..., V:]
  else:
    written = erased = None

  def step(state, inputs):
    update, written, erased = inputs
    if written is None:
      x = _corrections(update, state, dtype)
    else:
      x = written - product("...ck,...kv->...cv", erased, state, dtype)
    return intra.advance(update, state, x, dtype), (state, x)

  final, (entering, corrections) = jax.lax.scan(step, initial, (update, written, erased))
  return final, entering, corrections


def _carry_adjoints(update: intra.Updates, d_entering, d_corrections, d_final, dtype):
  """Runs the adjoint states back through the transposed chunks.

  `d_entering` and `d_corrections` are what the outputs of a chunk alone contribute. Returns the
  adjoint of the initial state, those of the states that leave, and of the corrections.
  """
  shared = update.beta.shape[-1] == 1
  erased = solve(update.gram, update.beta, update.read) if shared else None

  def step(adjoint, inputs):
    update, erased, d_entering, d_corrections = inputs
    d_corrections = d_corrections + product("...ck,...kv->...cv", update.write, adjoint, dtype)
    if erased is None:
      d_old, keys = transposed_solve(update.gram, update.beta, d_corrections), update.read
    else:
      d_old, keys = d_corrections, erased
    through = product("...ck,...cv->...kv", keys, d_old, dtype)
    decayed_adjoint = decayed(update.log_decay, adjoint)
    return decayed_adjoint + d_entering - through, (adjoint, d_corrections)

  d_initial, (leaving, d_corrections) = jax.lax.scan(
    step, d_final, (update, erased, d_entering, d_corrections), reverse=True
  )
  return d_initial, leaving, d_corrections


def _split(inputs: _Inputs, size: int) -> intra.Chunks:
  """The steps after the last are zeros: beta = 0 leaves the state."""
  *arrays, log_decay, _ = inputs
  return intra.Chunks(*(chunk(x, size) for x in arrays), chunk(log_decay[..., None], size)[..., 0])

"""Diagonal recurrences chunk by chunk: what the scans with one decay per state entry share.

    S_t = A_t ⊙ S_{t-1} + X_t        out_t = read(S_t)

`A` and `X` have the shape of the state at every step, far more than the inputs they are made of. So
they are made one chunk of C steps at a time. Between the chunks only the state passes, and the
backward pass keeps nothing else: it takes the state that entered a chunk, makes the chunk's `A`,
`X` and `S` again, and runs the adjoint through them,

    Λ_t = dS_t + A_{t+1} ⊙ Λ_{t+1}        dX_t = Λ_t        dA_t = Λ_t ⊙ S_{t-1}

Inside a chunk both directions take log C steps, over the chunks they are a `lax.scan`. Decays are
multiplied, never divided, so any value in [0, 1] is as good as any other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.checks import vary_alike

DEFAULT_CHUNK_SIZE = 64

Tree = Any


class Recurrence(NamedTuple):
  """A diagonal recurrence, by what it makes of C steps. Both functions act step by step."""

  update: Callable[..., tuple[jax.Array, jax.Array]]  # (steps, parameters) -> A, X [B, C, ...]
  read: Callable[..., jax.Array]  # (states [B, C, ...], steps, parameters) -> out [B, C, ...]


def widen(*arrays):
  """The arrays in float32, or as they are where they are wider."""
  return tuple(x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in arrays)


def check_chunk_size(scan_name: str, chunk_size: int | None):
  """Raises `ValueError` unless `chunk_size` is a power of two or None."""
  if chunk_size is not None and (chunk_size < 1 or chunk_size & (chunk_size - 1)):
    raise ValueError(f"{scan_name}: chunk_size={chunk_size} must be a power of two, such as 64.")


def first_of_segment(segments: jax.Array | None) -> jax.Array | None:
  """[B, T]: whether a step begins a segment; step 0 does not, it continues the initial state."""
  if segments is None:
    return None
  return jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))


def scan(
  recurrence: Recurrence,
  steps: Tree,  # arrays [B, T, ...]
  parameters: Tree,  # arrays without time
  state: jax.Array,  # [B, ...]
  segments: jax.Array | None,  # [B, T]
  *,
  chunk_size: int | None,  # None: all steps are one chunk
) -> tuple[jax.Array, jax.Array]:
  """Returns `out` [B, T, ...] and the state after the last step."""
  resets = first_of_segment(segments)
  length = jax.tree.leaves(steps)[0].shape[1]
  if chunk_size is None or length <= chunk_size:
    states = _chunk_states(recurrence, steps, parameters, state, resets, None)
    return recurrence.read(states, steps, parameters), states[:, -1]

  padded = length + -length % chunk_size
  real = None if padded == length else _cut(jnp.arange(padded)[None] < length, chunk_size)
  parameters, narrow = _sum_in_float32(parameters)

  def chunk(state, inputs):
    steps, resets, real = inputs
    own = narrow(parameters)
    states = _chunk_states(recurrence, steps, own, state, resets, real)
    return states[:, -1], recurrence.read(states, steps, own)

  # Kept for the backward pass: the inputs of `chunk`. A loop body needs no barrier against CSE.
  chunk = jax.checkpoint(chunk, prevent_cse=False)
  inputs = (*jax.tree.map(lambda x: _cut(x, chunk_size), (steps, resets)), real)
  state, out = jax.lax.scan(chunk, state, inputs)
  return jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :length], state


def _chunk_states(recurrence, steps, parameters, state, resets, real):
  """[B, C, ...]: the state after every step of a chunk."""
  decay, added = recurrence.update(steps, parameters)
  decay, added = decay.astype(state.dtype), added.astype(state.dtype)
  if real is not None:  # the steps after the last leave the state as it is
    resets = None if resets is None else resets & real
    decay, added = _where(real, decay, 1.0), _where(real, added)
  return _states(*vary_alike((decay, added, state, resets)))


def _merge(decay, added, state, resets):
  """S_1 .. S_C for A, X [B, C, ...] and S_0 [B, ...]; where `resets` [B, C], S_{t-1} is forgotten.

  Blocks of 1, 2, 4, ... steps are merged two by two, each with the states that it reaches from zero
  and the products of its decays; at a merge the first block's last state is carried through the
  second. Forgotten means left out, not multiplied by zero: what is infinite there stays there.
  """
  length = decay.shape[1]
  segment = None if resets is None else jnp.cumsum(resets, axis=1, dtype=jnp.int32)
  blocks = (decay, added, segment)
  padding = (1 << (length - 1).bit_length()) - length
  pad = lambda x: jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
  decays, states, segments = jax.tree.map(lambda x: pad(x)[:, :, None], blocks)  # [B, C/s, s, ...]
  while decays.shape[1] > 1:
    (decays_1, decays_2), (states_1, states_2) = _halves(decays), _halves(states)
    carried = decays_2 * states_1[:, :, -1:]
    if segments is not None:
      segments_1, segments_2 = _halves(segments)
      carried = _where(segments_2 == segments_1[:, :, -1:], carried)
      segments = jnp.concatenate([segments_1, segments_2], axis=2)
    states = jnp.concatenate([states_1, states_2 + carried], axis=2)
    decays = jnp.concatenate([decays_1, decays_2 * decays_1[:, :, -1:]], axis=2)
  carried = decays[:, 0, :length] * state[:, None]
  if segment is not None:
    carried = _where(segment == 0, carried)
  return states[:, 0, :length] + carried


def _halves(blocks):
  """[B, M, s, ...] -> the even and the odd blocks, [B, M/2, s, ...] each."""
  return blocks[:, 0::2], blocks[:, 1::2]


_states = jax.custom_vjp(_merge)


def _states_forward(decay, added, state, resets):
  states = _merge(decay, added, state, resets)
  return states, (decay, state, resets, states)


def _states_backward(kept, d_states):
  decay, state, resets, states = kept
  # The adjoint runs backwards with the decay of the step after, and does not cross a reset.
  # It is not a call of `_states`: custom rules nested in a recomputed loop body get wrong residuals
  # for second derivatives (JAX 0.11.2).
  flip_next = lambda x: jnp.flip(jnp.concatenate([x[:, 1:], x[:, :1]], axis=1), axis=1)
  nothing = jnp.zeros_like(state)
  flipped_resets = None if resets is None else flip_next(resets)
  adjoint = _merge(flip_next(decay), jnp.flip(d_states, axis=1), nothing, flipped_resets)
  adjoint = jnp.flip(adjoint, axis=1)
  d_decay = adjoint * jnp.concatenate([state[:, None], states[:, :-1]], axis=1)
  d_state = decay[:, 0] * adjoint[:, 0]
  if resets is not None:
    d_decay = _where(~resets, d_decay)
    d_state = _where(~resets[:, 0], d_state)
  return d_decay, adjoint, d_state, None


_states.defvjp(_states_forward, _states_backward)


def _cut(x, size):
  """[B, T, ...] -> [N, B, C, ...]; the last step is repeated, so that padding is never new data."""
  x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *((0, 0),) * (x.ndim - 2)), mode="edge")
  return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _where(mask, array, otherwise=0.0):
  """`jnp.where` with a mask of leading axes."""
  return jnp.where(mask.reshape(mask.shape + (1,) * (array.ndim - mask.ndim)), array, otherwise)


def _sum_in_float32(parameters):
  """Widened parameters and what undoes it in a chunk: gradients add up over chunks in float32."""
  dtypes = jax.tree.map(lambda x: x.dtype, parameters)
  narrow = lambda wide: jax.tree.map(lambda x, dtype: x.astype(dtype), wide, dtypes)
  wider = lambda x: widen(x)[0] if jnp.issubdtype(x.dtype, jnp.floating) else x
  return jax.tree.map(wider, parameters), narrow

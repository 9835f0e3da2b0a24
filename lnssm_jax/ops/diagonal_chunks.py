"""Diagonal recurrences chunk by chunk: what the scans with one decay per state entry share.

    S_t = A_t ⊙ S_{t-1} + X_t        out_t = read(S_t)

`A` and `X` have the shape of the state at every step, far more than the inputs they are made of. So
they are made one chunk of C steps at a time. Between the chunks only the state passes, and the
backward pass keeps nothing else: it takes the state that entered a chunk, makes the chunk's `A`,
`X` and `S` again, and runs the adjoint through them,

    Λ_t = dS_t + A_{t+1} ⊙ Λ_{t+1}        dX_t = Λ_t        dA_t = Λ_t ⊙ S_{t-1}

Inside a chunk both directions take log C steps, over the chunks they are a `lax.scan`.

Decays are multiplied, never divided, so any value in [0, 1] can be had. A decay near 1 is known by
what it lacks: float32 holds 1 - 10⁻⁶ with an error of 3% of that 10⁻⁶, and a thousand steps with
the same decay make a thousand times the same error. So every decay comes as a pair (A, 1 - A), each
computed without a difference, and is applied as S - (1 - A) ⊙ S where 1 - A is the smaller one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.checks import first_of_segment, vary_alike

DEFAULT_CHUNK_SIZE = 64

Tree = Any


class Recurrence(NamedTuple):
  """A diagonal recurrence, by what it makes of C steps. Both functions act step by step.

  `update` returns A, 1 - A and X. The gradient of the decay is passed to A only.
  """

  update: Callable[..., tuple[jax.Array, ...]]  # (steps, parameters) -> three times [B, C, ...]
  read: Callable[..., jax.Array]  # (states [B, C, ...], steps, parameters) -> out [B, C, ...]


def widen(*arrays):
  """The arrays in float32, or as they are where they are wider."""
  return tuple(x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in arrays)


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
  decay, lost, added = (x.astype(state.dtype) for x in recurrence.update(steps, parameters))
  if real is not None:  # the steps after the last leave the state as it is
    resets = None if resets is None else resets & real
    decay, lost, added = _where(real, decay, 1.0), _where(real, lost), _where(real, added)
  return _states(*vary_alike((decay, lost, added, state, resets)))


def _merge(decay, lost, added, state, resets):
  """S_1 .. S_C for A, 1 - A, X [B, C, ...] and S_0 [B, ...].

  Blocks of 1, 2, 4, ... steps are merged two by two, each with the states that it reaches from zero
  and the products of its decays; at a merge the first block's last state is carried through the
  second. Where `resets` [B, C] is true, S_{t-1} is forgotten. Forgotten means left out, not
  multiplied by zero: what is infinite there stays there.
  """
  length = decay.shape[1]
  segment = None if resets is None else jnp.cumsum(resets, axis=1, dtype=jnp.int32)
  padding = (1 << (length - 1).bit_length()) - length
  pad = lambda x: jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
  # From here on [B, C/s, s, ...]: blocks of s steps.
  blocks = jax.tree.map(lambda x: pad(x)[:, :, None], (decay, lost, added, segment))
  while blocks[0].shape[1] > 1:
    first, second = (jax.tree.map(lambda x, half=h: x[:, half::2], blocks) for h in (0, 1))
    last = jax.tree.map(lambda x: x[:, :, -1:], first)
    carried = _decayed(second[0], second[1], last[2])
    if segment is not None:
      carried = _where(second[3] == last[3], carried)
    # 1 - A_1 A_2 = (1 - A_1) + A_1 (1 - A_2): terms of one sign. Near 1 it is what A is made from,
    # since the rounding of A_1 and A_2 is a large part of what they take away.
    lost = last[1] + last[0] * second[1]
    decay = jnp.where(lost <= 0.5, 1 - lost, second[0] * last[0])
    merged = (decay, lost, second[2] + carried, second[3])
    blocks = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=2), first, merged)
  decay, lost, states, _ = jax.tree.map(lambda x: x[:, 0, :length], blocks)
  carried = _decayed(decay, lost, state[:, None])
  if segment is not None:
    carried = _where(segment == 0, carried)
  return states + carried


def _decayed(decay, lost, state):
  """A ⊙ S, with one rounding where A is near 1."""
  return jnp.where(lost <= 0.5, state - lost * state, decay * state)


_states = jax.custom_vjp(_merge)


def _states_forward(decay, lost, added, state, resets):
  states = _merge(decay, lost, added, state, resets)
  return states, (decay, lost, state, resets, states)


def _states_backward(kept, d_states):
  decay, lost, state, resets, states = kept
  # The adjoint runs backwards with the decay of the step after, and does not cross a reset.
  # It is not a call of `_states`: custom rules nested in a recomputed loop body get wrong residuals
  # for second derivatives (JAX 0.11.2).
  flip_next = lambda x: jnp.flip(jnp.concatenate([x[:, 1:], x[:, :1]], axis=1), axis=1)
  backwards = jax.tree.map(flip_next, (decay, lost, resets))
  d_states, nothing = jnp.flip(d_states, axis=1), jnp.zeros_like(state)
  adjoint = _merge(*backwards[:2], d_states, nothing, backwards[2])
  adjoint = jnp.flip(adjoint, axis=1)
  d_decay = adjoint * jnp.concatenate([state[:, None], states[:, :-1]], axis=1)
  d_state = _decayed(decay[:, 0], lost[:, 0], adjoint[:, 0])
  if resets is not None:
    d_decay = _where(~resets, d_decay)
    d_state = _where(~resets[:, 0], d_state)
  return d_decay, None, adjoint, d_state, None


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

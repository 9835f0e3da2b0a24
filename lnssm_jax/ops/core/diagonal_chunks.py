"""Diagonal recurrences chunk by chunk, with one decay per entry of the state.

    S_t = A_t ⊙ S_{t-1} + X_t        out_t = read(S_t)

`A` and `X` have the shape of the state for every token, far more than the inputs they are computed
from. So they are computed one chunk of C tokens at a time. Between chunks only the state is kept:
the backward pass takes the state that enters a chunk, recomputes the chunk's `A`, `X` and `S`, and
runs the adjoint through them,

    Λ_t = dS_t + A_{t+1} ⊙ Λ_{t+1}        dX_t = Λ_t        dA_t = Λ_t ⊙ S_{t-1}

Inside a chunk both directions have depth log C, over the chunks they are a `lax.scan`.

Decays are multiplied, never divided, so any value in [0, 1] is supported. A decay near 1 needs more
digits than float32 has: 1 - 10⁻⁶ is rounded by 3% of that 10⁻⁶, and a thousand tokens with the same
decay accumulate a thousand times that error. So every decay is a pair (A, 1 - A), each computed
without a difference, and is applied as S - (1 - A) ⊙ S where 1 - A is the smaller one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import widen
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.spmd import vary_alike

DEFAULT_CHUNK_SIZE = 64

Tree = Any


class Recurrence(NamedTuple):
  """A diagonal recurrence of C tokens. Both functions act on each token separately.

  `update` returns A, 1 - A and X. The cotangent of the decay goes to A only.
  """

  update: Callable[..., tuple[jax.Array, ...]]  # (tokens, parameters) -> three times [B, C, ...]
  read: Callable[..., jax.Array]  # (states [B, C, ...], tokens, parameters) -> out [B, C, ...]


def scan(
  recurrence: Recurrence,
  tokens: Tree,  # arrays [B, T, ...]
  parameters: Tree,  # arrays without time
  state: jax.Array,  # [B, ...]
  segments: Segments | None,
  *,
  chunk_size: int | None,  # None: all tokens are one chunk
) -> tuple[jax.Array, jax.Array]:
  """`out` [B, T, ...] and the state after the last token."""
  first = None if segments is None else segments.first()
  length = jax.tree.leaves(tokens)[0].shape[1]
  if chunk_size is None or length <= chunk_size:
    states = _chunk_states(recurrence, tokens, parameters, state, first, None)
    return recurrence.read(states, tokens, parameters), states[:, -1]

  padded = length + -length % chunk_size
  real = None if padded == length else _cut(jnp.arange(padded)[None] < length, chunk_size)
  parameters, narrow = _sum_in_float32(parameters)

  def chunk(state, inputs):
    tokens, resets, real = inputs
    own = narrow(parameters)
    states = _chunk_states(recurrence, tokens, own, state, resets, real)
    return states[:, -1], recurrence.read(states, tokens, own)

  # The residuals are the inputs of `chunk`. A loop body needs no barrier against CSE.
  chunk = jax.checkpoint(chunk, prevent_cse=False)
  inputs = (*jax.tree.map(lambda x: _cut(x, chunk_size), (tokens, first)), real)
  state, out = jax.lax.scan(chunk, state, inputs)
  return jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :length], state


def _chunk_states(recurrence, tokens, parameters, state, resets, real):
  """[B, C, ...]: the state after every token of a chunk."""
  decay, lost, added = (x.astype(state.dtype) for x in recurrence.update(tokens, parameters))
  if real is not None:  # padding leaves the state as it is
    resets = None if resets is None else resets & real
    decay, lost, added = _where(real, decay, 1.0), _where(real, lost), _where(real, added)
  return _states(*vary_alike((decay, lost, added, state, resets)))


def _merge(decay, lost, added, state, resets):
  """S_1 .. S_C for A, 1 - A, X [B, C, ...] and S_0 [B, ...].

  Blocks of 1, 2, 4, ... tokens are merged pairwise, each with the states that it reaches from zero
  and the products of its decays; at a merge the first block's last state is carried through the
  second. Where `resets` [B, C] is true, S_{t-1} is left out. It is not multiplied by zero: what is
  infinite there stays there.
  """
  length = decay.shape[1]
  segment = None if resets is None else jnp.cumsum(resets, axis=1, dtype=jnp.int32)
  padding = (1 << (length - 1).bit_length()) - length
  pad = lambda x: jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
  # From here on [B, C/s, s, ...]: blocks of s tokens.
  blocks = jax.tree.map(lambda x: pad(x)[:, :, None], (decay, lost, added, segment))
  while blocks[0].shape[1] > 1:
    first, second = (jax.tree.map(lambda x, half=h: x[:, half::2], blocks) for h in (0, 1))
    last = jax.tree.map(lambda x: x[:, :, -1:], first)
    carried = _decayed(second[0], second[1], last[2])
    if segment is not None:
      carried = _where(second[3] == last[3], carried)
    # 1 - A_1 A_2 = (1 - A_1) + A_1 (1 - A_2): terms of one sign. Near 1 A is computed from it,
    # since the rounding of A_1 and A_2 is a large part of 1 - A.
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


def _states_backward(residuals, d_states):
  decay, lost, state, resets, states = residuals
  # The adjoint runs backwards with the decay of the next token, and does not cross a reset.
  # It is not a call of `_states`: custom rules nested in a recomputed loop body get wrong residuals
  # for second derivatives (JAX 0.11.2).
  flip_next = lambda x: jnp.flip(jnp.concatenate([x[:, 1:], x[:, :1]], axis=1), axis=1)
  decay_next, lost_next, resets_next = jax.tree.map(flip_next, (decay, lost, resets))
  d_states, nothing = jnp.flip(d_states, axis=1), jnp.zeros_like(state)
  adjoint = _merge(decay_next, lost_next, d_states, nothing, resets_next)
  adjoint = jnp.flip(adjoint, axis=1)
  d_decay = adjoint * jnp.concatenate([state[:, None], states[:, :-1]], axis=1)
  d_state = _decayed(decay[:, 0], lost[:, 0], adjoint[:, 0])
  if resets is not None:
    d_decay = _where(~resets, d_decay)
    d_state = _where(~resets[:, 0], d_state)
  return d_decay, None, adjoint, d_state, None


_states.defvjp(_states_forward, _states_backward)


def _cut(x, size):
  """[B, T, ...] -> [N, B, C, ...]; the last token is repeated, so that padding is no new data."""
  x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *((0, 0),) * (x.ndim - 2)), mode="edge")
  return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _where(mask, array, otherwise=0.0):
  """`jnp.where` with a mask of leading axes."""
  return jnp.where(mask.reshape(mask.shape + (1,) * (array.ndim - mask.ndim)), array, otherwise)


def _sum_in_float32(parameters):
  """Widened parameters, whose gradients add up over chunks in float32; and the inverse cast."""
  dtypes = jax.tree.map(lambda x: x.dtype, parameters)
  narrow = lambda wide: jax.tree.map(lambda x, dtype: x.astype(dtype), wide, dtypes)
  wider = lambda x: widen(x)[0] if jnp.issubdtype(x.dtype, jnp.floating) else x
  return jax.tree.map(wider, parameters), narrow

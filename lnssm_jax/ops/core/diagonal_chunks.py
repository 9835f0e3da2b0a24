"""Diagonal recurrences chunk by chunk, with one decay per entry of the state.

    S_t = A_t ⊙ S_{t-1} + X_t        out_t = read(S_t)

`A` and `X` have the shape of the state for every token, far more than the inputs they are computed
from. So they are computed for one block of a few tokens at a time, whose loop over tokens is
unrolled: a compiler can fuse it with `update` and `read`. A chunk is a `lax.scan` over its blocks,
the sequence a `lax.scan` over its chunks. The residuals are the states between chunks. The backward
pass recomputes the states between the blocks of one chunk, then those of one block, and runs the
adjoint through them,

    Λ_t = dS_t + A_{t+1} ⊙ Λ_{t+1}        dX_t = Λ_t        dA_t = Λ_t ⊙ S_{t-1}

With `chunk_size=None` both directions are an associative scan of depth log T over all tokens.

Decays are multiplied, never divided, so any value in [0, 1] is supported. A decay near 1 needs more
digits than float32 has: 1 - 10⁻⁶ is rounded by 3% of that 10⁻⁶, and a thousand tokens with the same
decay accumulate a thousand times that error. So every decay is a pair (A, 1 - A), each computed
without a difference, and is applied as S - (1 - A) ⊙ S where 1 - A is the smaller one. The same
holds for the rounding of the state: in a chunk it is a pair too, (S, what S was rounded by).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core import chunk_groups
from lnssm_jax.ops.core.precision import widen
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.spmd import vary_alike
from pallas_kernels.core.gradients import custom_vjp

DEFAULT_CHUNK_SIZE = 64
_BLOCK_SIZE = 8  # tokens per iteration of a chunk's loop

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
  chunk_size: int | None,  # a power of two; None: an associative scan over all tokens
) -> tuple[jax.Array, jax.Array]:
  """`out` [B, T, ...] and the state after the last token."""
  first = None if segments is None else segments.first()
  length = jax.tree.leaves(tokens)[0].shape[1]
  if chunk_size is None:
    states, _ = _chunk_states(_merge, recurrence, (tokens, first, None), parameters, _exact(state))
    return recurrence.read(states, tokens, parameters), states[:, -1]

  block_size = min(_BLOCK_SIZE, chunk_size, length)
  parameters, narrow = _sum_in_float32(parameters)
  one_block = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((x.shape[0], block_size, *x.shape[2:]), x.dtype), tokens
  )
  update, closed_over = jax.closure_convert(recurrence.update, one_block, narrow(parameters))

  def chunk(inputs, parameters, state):
    tokens, first = inputs
    length = jax.tree.leaves(tokens)[0].shape[1]
    real = None if length % block_size == 0 else jnp.arange(length + -length % block_size) < length
    parameters, closed_over = parameters

    def block(state, inputs):
      own = narrow(parameters)
      updates = Recurrence(lambda *args: update(*args, *closed_over), recurrence.read)
      states, state = _chunk_states(_loop, updates, inputs, own, state)
      return state, recurrence.read(states, inputs[0], own)

    # The residuals are the inputs of a block. A loop body needs no barrier against CSE.
    blocks = jax.tree.map(
      lambda x: _cut(x, block_size), (tokens, first, None if real is None else real[None])
    )
    block = jax.checkpoint(block, prevent_cse=False)
    (state, _), out = jax.lax.scan(block, _exact(state), blocks)
    out = jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:])
    return out[:, :length], state

  parameters = parameters, closed_over
  sizes = chunk_groups.Sizes(chunk_size, chunk_size)
  return chunk_groups.run(chunk, sizes, (tokens, first), parameters, state)


def _exact(state):
  """A state as a pair: itself, and nothing that it was rounded by."""
  return vary_alike((state, jnp.zeros_like(state)))


def _chunk_states(run, recurrence, inputs, parameters, state):
  """[B, C, ...]: the state after every token; and the last one as a pair."""
  tokens, resets, real = inputs
  decay, lost, added = (x.astype(state[0].dtype) for x in recurrence.update(tokens, parameters))
  if real is not None:  # padding leaves the state as it is
    resets = None if resets is None else resets & real
    decay, lost, added = _where(real, decay, 1.0), _where(real, lost), _where(real, added)
  return _states(run, *vary_alike((decay, lost, added, state, resets)))


def _loop(decay, lost, added, state, resets, reverse=False):
  """S_1 .. S_C for A, 1 - A, X [B, C, ...] and S_0, a pair; and the last one as a pair.

  Where `resets` [B, C] is true, S_{t-1} is left out. It is not multiplied by zero: what is infinite
  there stays there.
  """
  high, low = state
  near_one = lost <= 0.5
  factor = jnp.where(near_one, -lost, decay)
  states = [high] * decay.shape[1]
  for t in reversed(range(len(states))) if reverse else range(len(states)):
    if resets is not None:
      high, low = _where(~resets[:, t], high), _where(~resets[:, t], low)
    kept, low = (jnp.where(near_one[:, t], x, 0.0) for x in (high, low))
    change = low + (factor[:, t] * high + added[:, t])
    high = kept + change
    low = jax.lax.stop_gradient(change - (high - kept))
    # Else XLA may compute the tokens before it again for each token of the block.
    high, low = jax.lax.optimization_barrier((high, low))
    states[t] = high
  return jnp.stack(states, axis=1), (high, low)


def _merge(decay, lost, added, state, resets, reverse=False):
  """The same by an associative scan: depth log C, with every intermediate in memory.

  Blocks of 1, 2, 4, ... tokens are merged pairwise, each with the states that it reaches from zero
  and the products of its decays; at a merge the first block's last state is carried through the
  second.
  """
  flip = (lambda x: jnp.flip(x, axis=1)) if reverse else (lambda x: x)
  decay, lost, added, resets = jax.tree.map(flip, (decay, lost, added, resets))
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
  carried = _decayed(decay, lost, (state[0] + state[1])[:, None])
  if segment is not None:
    carried = _where(segment == 0, carried)
  states = states + carried
  return flip(states), (states[:, -1], jnp.zeros_like(states[:, -1]))


def _decayed(decay, lost, state):
  """A ⊙ S, with one rounding where A is near 1."""
  return jnp.where(lost <= 0.5, state - lost * state, decay * state)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _states(run, decay, lost, added, state, resets):
  return run(decay, lost, added, state, resets)


def _states_forward(run, decay, lost, added, state, resets):
  states, last = run(decay, lost, added, state, resets)
  return (states, last), (decay, lost, state[0], resets, states)


def _states_backward(run, residuals, cotangents):
  decay, lost, state, resets, states = residuals
  d_states, d_last = cotangents
  # The adjoint runs backwards with the decay of the next token, and does not cross a reset. The
  # last state's cotangent enters undecayed, and a token before the first adds nothing. The adjoint
  # is a pair too, whose sum counts: these are the cotangents of the state's pair. It is no call of
  # `_states`: custom rules nested in a recomputed loop body get wrong residuals for second
  # derivatives (JAX 0.11.2).
  longer = lambda x, y: jnp.concatenate([x, jnp.full_like(x[:, :1], y)], axis=1)
  adjoint, d_state = run(
    longer(decay, 1),
    longer(lost, 0),
    jnp.concatenate([jnp.zeros_like(d_states[:, :1]), d_states], axis=1),
    d_last,
    None if resets is None else longer(resets, False),
    reverse=True,
  )
  adjoint = adjoint[:, 1:]
  d_decay = adjoint * jnp.concatenate([state[:, None], states[:, :-1]], axis=1)
  if resets is not None:
    d_decay = _where(~resets, d_decay)
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

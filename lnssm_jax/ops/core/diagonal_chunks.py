"""Diagonal recurrences chunk by chunk, with one decay per entry of the state.

    S_t = A_t ⊙ S_{t-1} + X_t        out_t = read(S_t)

`A` and `X` have the shape of the state for every token, far more than the inputs they are computed
from. So they are computed for one block of a few tokens at a time, whose loop over tokens is
unrolled: a compiler can fuse it with `update`. A chunk is a `lax.scan` over its blocks, the
sequence a `lax.scan` over its chunks. The residuals are the states between chunks. The backward
pass recomputes the states between the blocks of one chunk, then those of one block, and runs the
adjoint through them,

    Λ_t = dS_t + A_{t+1} ⊙ Λ_{t+1}        dX_t = Λ_t        dA_t = Λ_t ⊙ S_{t-1}

An accelerator computes all states of a block in one kernel, forward, and backward with all Λ; two
to four more kernels sum over them. So blocks are as long as memory allows there, and where the
inputs are bfloat16, so are the states that are summed over. A CPU has short blocks, whose states
it computes one after the other.

`associative` is an associative scan of depth log T over all tokens, in both directions.

Decays are multiplied, never divided, so any value in [0, 1] is supported. A decay near 1 needs more
digits than float32 has: 1 - 10⁻⁶ is rounded by 3% of that 10⁻⁶, and a thousand tokens with the same
decay accumulate a thousand times that error. So every decay is a pair (A, 1 - A), each computed
without a difference, and is applied as S - (1 - A) ⊙ S where 1 - A is the smaller one. The same
holds for the rounding of the state: in a block it is a pair too, (S, what S was rounded by).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from lnssm_jax.ops.core import chunk_groups
from lnssm_jax.ops.core.precision import widen
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.spmd import vary_alike
from pallas_kernels.core.gradients import custom_vjp

_CHUNK_SIZE = 64
_CPU_BLOCK_SIZE = 8
# Of accelerators: tokens, which are a chunk of their own; and numbers in the states of a block.
_LONGEST_BLOCK, _LARGEST_BLOCK = 32, 1 << 23

Tree = Any


class Recurrence(NamedTuple):
  """A diagonal recurrence of C tokens. Both functions act on each token separately.

  `update` returns A, 1 - A and X. The cotangent of the decay goes to A only. `read` is linear in
  the states, which may be narrower than the state that is carried.
  """

  update: Callable[..., tuple[jax.Array, ...]]  # (tokens, parameters) -> three times [B, C, ...]
  read: Callable[..., jax.Array]  # (states [B, C, ...], tokens, parameters) -> out [B, C, ...]


class _Static(NamedTuple):
  """Static arguments of a block."""

  recurrence: Recurrence
  stored: jnp.dtype  # of the states that are summed over
  one_by_one: bool  # whether a token's state is computed before the next one's


def scan(
  recurrence: Recurrence,
  tokens: Tree,  # arrays [B, T, ...]
  parameters: Tree,  # arrays without time
  state: jax.Array,  # [B, ...]
  segments: Segments | None,
  *,
  chunk_size: int | None,  # a power of two; None: the device's
) -> tuple[jax.Array, jax.Array]:
  """`out` [B, T, ...] and the state after the last token."""
  first = None if segments is None else segments.first()
  length = jax.tree.leaves(tokens)[0].shape[1]
  on_cpu = jax.default_backend() == "cpu"
  longest = _CPU_BLOCK_SIZE if on_cpu else _accelerator_block_size(state)
  chunk_size = chunk_size or (longest if longest == _LONGEST_BLOCK else _CHUNK_SIZE)
  block_size = min(longest, chunk_size, length)
  parameters, narrow = _sum_in_float32(parameters)
  one_block = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((x.shape[0], block_size, *x.shape[2:]), x.dtype), tokens
  )
  update, closed_over = jax.closure_convert(recurrence.update, one_block, narrow(parameters))
  if not closed_over:  # the converted one has fixed shapes, and varies over no axes of a mesh
    update = recurrence.update
  own = Recurrence(
    lambda tokens, parameters: update(tokens, parameters[0], *parameters[1]),
    lambda states, tokens, parameters: recurrence.read(states, tokens, parameters[0]),
  )
  rounds = not on_cpu and jax.tree.leaves(tokens)[0].dtype == jnp.bfloat16
  static = _Static(own, jnp.dtype(jnp.bfloat16) if rounds else state.dtype, on_cpu)

  def chunk(inputs, parameters, state):
    tokens, first = inputs
    length = jax.tree.leaves(tokens)[0].shape[1]
    real = None if length % block_size == 0 else jnp.arange(length + -length % block_size) < length
    parameters, closed_over = parameters

    def block(state, inputs):
      return _block(static, inputs, (narrow(parameters), closed_over), state)

    blocks = jax.tree.map(
      lambda x: _cut(x, block_size), (tokens, first, None if real is None else real[None])
    )
    (state, _), out = jax.lax.scan(block, _exact(state), blocks)
    out = jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:])
    return out[:, :length], state

  sizes = chunk_groups.Sizes(chunk_size, chunk_size)
  return chunk_groups.run(chunk, sizes, (tokens, first), (parameters, closed_over), state)


def _accelerator_block_size(state: jax.Array) -> int:
  """Tokens per block, a power of two."""
  if any(map(is_symbolic_dim, state.shape)):
    return _CPU_BLOCK_SIZE
  fit = max(_LARGEST_BLOCK // max(state.size, 1), 1)
  return min(1 << (fit.bit_length() - 1), _LONGEST_BLOCK)


def associative(recurrence, tokens, parameters, state, segments) -> tuple[jax.Array, jax.Array]:
  """`scan` by an associative scan over all tokens."""
  resets = None if segments is None else segments.first()
  decay, lost, added = (x.astype(state.dtype) for x in recurrence.update(tokens, parameters))
  states = _merged(*vary_alike((decay, lost, added, state, resets)))
  return recurrence.read(states, tokens, parameters), states[:, -1]


def _exact(state):
  """A state as a pair: itself, and nothing that it was rounded by."""
  return vary_alike((state, jnp.zeros_like(state)))


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _block(static, inputs, parameters, state):
  """The state after a block, a pair as before it, and `out` [B, C, ...]."""
  tokens, resets, real = inputs
  updates = _updates(static, tokens, parameters, real, state)
  states, last = _states(static, *updates, state, _real(resets, real))
  states, last = jax.lax.optimization_barrier((_stored(static, states), last))
  return last, static.recurrence.read(jnp.stack(states, axis=1), tokens, parameters)


def _block_forward(static, inputs, parameters, state):
  # A second derivative would get other arrays in the place of residuals that are arguments.
  residuals = jax.lax.optimization_barrier((inputs, parameters, state))
  return _block(static, inputs, parameters, state), residuals


def _block_backward(static, residuals, cotangents):
  (tokens, resets, real), parameters, state = residuals
  d_last, d_out = cotangents
  resets = _real(resets, real)

  def update(tokens, parameters):
    decay, lost, added = _updates(static, tokens, parameters, real, state)
    return (decay, added), lost

  (decay, added), pull, lost = jax.vjp(update, tokens, parameters, has_aux=True)
  states, _ = _states(static, decay, lost, added, state, resets)
  _, pull_states = jax.vjp(
    lambda states: static.recurrence.read(states, tokens, parameters), jnp.zeros_like(added)
  )
  (d_states,) = pull_states(d_out)
  # The adjoint runs backwards with the decay of the next token, and does not cross a reset. The
  # last state's cotangent enters undecayed, and a token before the first adds nothing. The adjoint
  # is a pair too, whose sum counts: these are the cotangents of the state's pair.
  adjoints, d_state = _states(static, *_reverse(decay, lost, d_states, d_last, resets), True)
  states, adjoints, d_state = jax.lax.optimization_barrier(
    (_stored(static, [state[0], *states]), _stored(static, adjoints[1:]), d_state)
  )
  wide = lambda x: jnp.stack(x, axis=1).astype(state[0].dtype)
  adjoint = wide(adjoints)
  d_tokens, d_parameters = pull((_by_decay(adjoint, wide(states[:-1]), resets), adjoint))
  after = jnp.stack(states[1:], axis=1)
  _, pull_read = jax.vjp(functools.partial(static.recurrence.read, after), tokens, parameters)
  add = lambda x, y: x if x.dtype == jax.dtypes.float0 else x + y
  d_tokens, d_parameters = jax.tree.map(add, (d_tokens, d_parameters), pull_read(d_out))
  return (d_tokens, None, None), d_parameters, d_state


_block.defvjp(_block_forward, _block_backward)


def _updates(static, tokens, parameters, real, state):
  """A, 1 - A and X of a block; padding leaves the state as it is."""
  update = static.recurrence.update(tokens, parameters)
  decay, lost, added = (x.astype(state[0].dtype) for x in update)
  if real is None:
    return decay, lost, added
  return _where(real, decay, 1.0), _where(real, lost), _where(real, added)


def _real(resets, real):
  return resets if resets is None or real is None else resets & real


def _stored(static, states):
  return [x.astype(static.stored) for x in states]


def _states(static, decay, lost, added, state, resets, reverse=False):
  """[S_1, .., S_C] for A, 1 - A, X [B, C, ...] and S_0, a pair; and the last one as a pair.

  Where `resets` [B, C] is true, S_{t-1} is left out. It is not multiplied by zero: what is infinite
  there stays there.
  """
  high, low = state
  states = [high] * decay.shape[1]
  for t in reversed(range(len(states))) if reverse else range(len(states)):
    if resets is not None:
      high, low = _where(~resets[:, t], high), _where(~resets[:, t], low)
    near_one = lost[:, t] <= 0.5
    kept, low = (jnp.where(near_one, x, 0.0) for x in (high, low))
    change = jnp.where(near_one, -lost[:, t], decay[:, t]) * high + added[:, t]
    if static.stored == high.dtype:  # else they are rounded far more
      change = low + change
      low = jax.lax.stop_gradient(change - (kept + change - kept))
    high = kept + change
    if static.one_by_one:
      # Else XLA may compute the tokens before it again for each token of the block.
      high, low = jax.lax.optimization_barrier((high, low))
    states[t] = high
  return states, (high, low)


def _reverse(decay, lost, d_states, d_last, resets):
  """Arguments of the recurrence of the adjoint, which has one token more."""
  longer = lambda x, y: jnp.concatenate([x, jnp.full_like(x[:, :1], y)], axis=1)
  added = jnp.concatenate([jnp.zeros_like(d_states[:, :1]), d_states], axis=1)
  resets = None if resets is None else longer(resets, False)
  return longer(decay, 1), longer(lost, 0), added, d_last, resets


def _merge(decay, lost, added, state, resets, reverse=False):
  """[B, T, ...]: S_1 .. S_T by an associative scan, depth log T, with every intermediate in memory.

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
  carried = _decayed(decay, lost, state[:, None])
  if segment is not None:
    carried = _where(segment == 0, carried)
  states = states + carried
  return flip(states)


def _decayed(decay, lost, state):
  """A ⊙ S, with one rounding where A is near 1."""
  return jnp.where(lost <= 0.5, state - lost * state, decay * state)


@custom_vjp
def _merged(decay, lost, added, state, resets):
  return _merge(decay, lost, added, state, resets)


def _merged_forward(decay, lost, added, state, resets):
  states = _merge(decay, lost, added, state, resets)
  return states, (decay, lost, state, resets, states)


def _merged_backward(residuals, d_states):
  decay, lost, state, resets, states = residuals
  nothing = jnp.zeros_like(state)
  adjoint = _merge(*_reverse(decay, lost, d_states, nothing, resets), reverse=True)
  d_state, adjoint = adjoint[:, 0], adjoint[:, 1:]
  before = jnp.concatenate([state[:, None], states[:, :-1]], axis=1)
  return _by_decay(adjoint, before, resets), None, adjoint, d_state, None


_merged.defvjp(_merged_forward, _merged_backward)


def _by_decay(adjoint, before, resets):
  """The gradient of the decays."""
  d_decay = adjoint * before
  return d_decay if resets is None else _where(~resets, d_decay)


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

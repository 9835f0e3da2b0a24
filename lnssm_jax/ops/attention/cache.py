"""The key-value cache: a ring buffer, token p of a document in slot p mod M.

So the caches of windows and blocks keep their size, a decoding step writes one slot, and the
growing cache of full attention, which has a slot for every token, is simply in order. Which token a
slot holds follows from the number of tokens alone; the softmax does not depend on their order.
"""

import jax.numpy as jnp

from lnssm_jax.ops.attention.types import AttentionState, Inputs, Mask, Tokens
from lnssm_jax.ops.core.segments import positions

EMPTY = -1  # the document of empty slots: no token sees them


def tokens_of(inputs: Inputs) -> Tokens:
  """The tokens of q and k, [B, T]."""
  before = None if inputs.state is None else inputs.state.position
  B, T = inputs.q.shape[:2]
  position = positions(inputs.segments, B, T, before)
  if inputs.segments is None:
    return Tokens(position, jnp.zeros_like(position))
  return Tokens(position, inputs.segments.index)


def cached_tokens(state: AttentionState) -> Tokens:
  """The tokens in the slots of a cache, [B, M]."""
  room = state.k.shape[1]
  last = state.position[:, None] - 1
  slot = jnp.arange(room, dtype=jnp.int32)
  position = last - (last - slot) % max(room, 1)
  return Tokens(position, jnp.where(position >= 0, 0, EMPTY))


def advance(mask: Mask, state: AttentionState | None, k, v, tokens: Tokens) -> AttentionState:
  """The cache after tokens with keys k [B, T, G, K] and values v [B, T, G, V]."""
  length = k.shape[1]
  count = tokens.position[:, -1:] + 1
  in_last = tokens.document == tokens.document[:, -1:]
  held = 0 if state is None else state.k.shape[1]
  room = held + length if mask.room is None else mask.room

  # Tokens that no later token can see go to slots that do not exist.
  keep = in_last & (count - tokens.position <= room)
  slot = jnp.where(keep, tokens.position % max(room, 1), room + jnp.arange(length))
  row = jnp.arange(k.shape[0])[:, None]
  continues = (tokens.document[:, -1] == 0)[:, None, None, None]

  def write(old, new):
    if old is None or room == 0:
      old = jnp.zeros((new.shape[0], room, *new.shape[2:]), new.dtype)
    else:
      old = jnp.pad(old, ((0, 0), (0, room - held), (0, 0), (0, 0)))
      old = jnp.where(continues, old, 0)
    if room == 0:
      return old
    return old.at[row, slot].set(new, mode="drop", unique_indices=True)

  old_k, old_v = (None, None) if state is None else (state.k, state.v)
  return AttentionState(write(old_k, k), write(old_v, v), count[:, 0])

"""The key-value cache, where each step stands in its segment, and which step sees which.

The cache is a ring: step p of a segment lies in slot p mod M. So the caches of a window and of a
block keep their size, a step of decoding writes one slot, and the growing cache of full attention,
which has room for every step, is simply in order. Which step a slot holds follows from the number
of steps alone; the softmax does not mind the order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.checks import check_shape, first_of_segment, segment_index

_NAME = "attention"


class AttentionState(NamedTuple):
  """The keys and values that later steps can see, in the dtypes of k and v.

  M is window - 1 with a window, block - 1 with blocks, else the number of steps so far.
  """

  k: jax.Array  # [B, M, G, K], step p of the segment in slot p mod M
  v: jax.Array  # [B, M, G, V]
  position: jax.Array  # [B] int32, the number of steps of the segment so far


class Steps(NamedTuple):
  """Where steps stand: two of them see each other only with equal segments."""

  position: jax.Array  # [B, T] int32, counted in the segment from 0
  segment: jax.Array  # [B, T] int32, from 0; below 0 for what no step may see


class Rule(NamedTuple):
  """Which of the earlier steps a step sees."""

  window: int | None
  block: int | None
  causal: bool

  def reach(self, length: int) -> int:
    """How many steps apart two of `length` steps that see each other can be, plus 1."""
    return min(self.window or self.block or length, length)

  def visible(self, queries: Steps, keys: Steps) -> jax.Array:
    """[..., T, S] for steps [..., T] and [..., S]."""
    query, key = queries.position[..., :, None], keys.position[..., None, :]
    seen = queries.segment[..., :, None] == keys.segment[..., None, :]
    if self.causal:
      seen &= key <= query
    if self.window is not None:
      seen &= jnp.abs(query - key) < self.window
    if self.block is not None:
      seen &= query // self.block == key // self.block
    return seen


def init_attention_state(
  batch_size: int,
  kv_heads: int,
  key_width: int,
  value_width: int | None = None,
  *,
  window: int | None = None,
  block: int | None = None,
  dtype=jnp.float32,
) -> AttentionState:
  """The empty cache: with a window or blocks of the size that it keeps, else without room yet.

  A cache of fixed size for full attention over at most L steps is that of `window=L`: up to L steps
  a window of L shows everything.
  """
  room = (window or block or 1) - 1
  value_width = key_width if value_width is None else value_width
  return AttentionState(
    jnp.zeros((batch_size, room, kv_heads, key_width), dtype),
    jnp.zeros((batch_size, room, kv_heads, value_width), dtype),
    jnp.zeros(batch_size, jnp.int32),
  )


def attention_positions(
  batch_size: int,
  length: int,
  *,
  segment_ids: jax.Array | None = None,
  initial_state: AttentionState | None = None,
) -> jax.Array:
  """[B, T] int32: how many steps of its segment are before each step, as a rotary embedding needs.

  `initial_state` belongs to the first segment, which goes on counting where it stopped.
  """
  segments = segment_index("attention_positions", segment_ids, batch_size, length)
  before = None if initial_state is None else initial_state.position
  if before is not None:
    check_shape("attention_positions", "initial_state.position", before, (batch_size,), "[B]")
  return steps_of(batch_size, length, segments, before).position


def steps_of(batch: int, length: int, segments, before) -> Steps:
  """Steps [B, T] from the numbered segments or None, and the steps before them [B] or None."""
  index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
  before = 0 if before is None else before[:, None]
  if segments is None:
    return Steps(index + before, jnp.zeros_like(index))
  first = first_of_segment(segments)
  start = jax.lax.cummax(jnp.where(first, index, 0), axis=1)
  return Steps(index - start + jnp.where(segments == 0, before, 0), segments)


def cached_steps(state: AttentionState) -> Steps:
  """Which steps the slots of a cache hold, [B, M]."""
  room = state.k.shape[1]
  last = state.position[:, None] - 1
  slot = jnp.arange(room, dtype=jnp.int32)
  position = last - (last - slot) % max(room, 1)
  return Steps(position, jnp.where(position >= 0, 0, -1))


def advance(rule: Rule, state: AttentionState | None, k, v, steps: Steps) -> AttentionState:
  """The cache after steps with keys k [B, T, G, K] and values v [B, T, G, V]."""
  length = k.shape[1]
  count = steps.position[:, -1:] + 1
  last = steps.segment == steps.segment[:, -1:]
  held = 0 if state is None else state.k.shape[1]
  fixed = rule.window or rule.block
  room = fixed - 1 if fixed else held + length

  # Steps that no later step can see go to slots that do not exist.
  keep = last & (count - steps.position <= room)
  slot = jnp.where(keep, steps.position % max(room, 1), room + jnp.arange(length))
  row = jnp.arange(k.shape[0])[:, None]
  goes_on = (steps.segment[:, -1] == 0)[:, None, None, None]

  def write(old, new):
    if old is None or room == 0:
      old = jnp.zeros((new.shape[0], room, *new.shape[2:]), new.dtype)
    else:
      old = jnp.pad(old, ((0, 0), (0, room - held), (0, 0), (0, 0)))
      old = jnp.where(goes_on, old, 0)
    if room == 0:
      return old
    return old.at[row, slot].set(new, mode="drop", unique_indices=True)

  old_k, old_v = (None, None) if state is None else (state.k, state.v)
  return AttentionState(write(old_k, k), write(old_v, v), count[:, 0])

"""What crosses the borders between the parts of a divided sequence: inputs, positions, segments.

As in `matrix_states.py`, every function runs inside `jax.shard_map` on one device's part of the
steps.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.attention.state import steps_of
from lnssm_jax.ops.checks import check_shape, segment_index
from lnssm_jax.ops.sequence_parallel.exchange import digits, place, states

_NAME = "sequence_parallel"


def inputs_before(
  x: jax.Array,  # [B, T, D]
  count: int,
  first: jax.Array | None,  # [B, count, D]
  segment_ids: jax.Array | None,  # [B, T] integer
  *,
  axis_name: str,
) -> jax.Array:
  """The `count` inputs before this part, [B, count, D]: one exchange with the next device.

  Before the whole sequence stands `first`, zeros if None. Inputs of another segment than that of
  this part's first step are zero.

  Raises:
    ValueError: a part has fewer than `count` steps, or `axis_name` is not a mapped axis.
  """
  index, _ = place(axis_name)
  B, T, D = x.shape
  first = jnp.zeros((B, count, D), x.dtype) if first is None else first
  check_shape(_NAME, "first", first, (B, count, D), "[B, count, D]")
  _check_length(T, count, axis_name)
  if count == 0:
    return first
  sent = x[:, T - count :]
  if segment_ids is None:
    received = _from_part_before(sent, axis_name)
  else:
    ids = digits(jnp.asarray(segment_ids), x.dtype)
    both = jnp.concatenate([sent, ids[:, T - count :]], axis=-1)
    received, received_ids = jnp.split(_from_part_before(both, axis_name), [D], axis=-1)
    same = jnp.all(received_ids == ids[:, :1], axis=-1, keepdims=True)
    # All steps between must be of the segment too: an id may come back.
    same = jnp.flip(jnp.cumprod(jnp.flip(same, 1).astype(jnp.int32), axis=1), 1)
    received = jnp.where(same > 0, received, 0)
  return jnp.where(index == 0, first.astype(x.dtype), received)


def continues(
  first: jax.Array,  # [B] bool
  segment_ids: jax.Array | None,  # [B, T] integer
  *,
  axis_name: str,
) -> jax.Array:
  """[B]: whether this part's first step continues a segment of the part before; `first` in part 0.

  Raises:
    ValueError: `axis_name` is not a mapped axis.
  """
  index, _ = place(axis_name)
  if segment_ids is None:
    return first | (index > 0)
  ids = jnp.asarray(segment_ids)
  same = _from_part_before(ids[:, -1], axis_name) == ids[:, 0]
  return jnp.where(index == 0, first, same)


def of_last(tree: Any, *, axis_name: str) -> Any:
  """The arrays of the last part, on all devices: one all-reduce, none where nothing reads them."""
  index, count = place(axis_name)
  return jax.tree.map(
    lambda x: jax.lax.psum(jnp.where(index == count - 1, x, jnp.zeros_like(x)), axis_name), tree
  )


def step_positions(
  batch: int,
  length: int,
  segment_ids: jax.Array | None,  # [B, T] integer
  before: jax.Array | None,  # [B] integer
  *,
  axis_name: str | None,
) -> tuple[jax.Array, jax.Array]:
  """How many steps of its segment are before each step, [B, T] int32; and the count at the end [B].

  The count is that of the last segment of the whole sequence. `before` is how many steps of the
  first segment are before the sequence; None means 0. Without segments nothing is exchanged.

  Raises:
    ValueError: shapes do not agree, or `axis_name` is not a mapped axis.
  """
  segments = segment_index(_NAME, segment_ids, batch, length)
  if before is None:
    before = jnp.zeros(batch, jnp.int32)
  check_shape(_NAME, "before", before, (batch,), "[B]")
  if axis_name is None:
    position = steps_of(batch, length, segments, before).position
    return position, position[:, -1] + 1
  index, count = place(axis_name)
  if segments is None:
    position = steps_of(batch, length, None, before + index * length).position
    return position, before + count * length
  in_last = jnp.sum(segments == segments[:, -1:], axis=1, dtype=jnp.int32)
  entering, final = states(
    axis_name, in_last, before, lambda steps, state: state + steps, segment_ids
  )
  return steps_of(batch, length, segments, entering).position, final


def _from_part_before(x, axis_name):
  """x of the part before this one; zeros in part 0."""
  count = jax.lax.axis_size(axis_name)
  return jax.lax.ppermute(x, axis_name, [(j, j + 1) for j in range(count - 1)])


def _check_length(length, count, axis_name):
  if length < count:
    raise ValueError(
      f"{_NAME}: a part of the sequence has {length} steps, but {count} steps before each part are "
      f"needed; divide over fewer devices of axis {axis_name!r}, or take longer sequences."
    )

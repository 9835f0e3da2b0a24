"""Halo exchange between sequence shards: convolution inputs, positions, document boundaries.

Every function runs inside `jax.shard_map` on one device's shard of the tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.checks import check_shape, checked_integers
from lnssm_jax.ops.core.segments import digits, positions, segments_of
from lnssm_jax.ops.core.sequence_parallel import place, states

_NAME = "sequence_parallel"


def inputs_before(
  x: jax.Array,  # [B, T, D]
  count: int,
  first: jax.Array | None,  # [B, count, D]
  segment_ids: jax.Array | None,  # [B, T] integer
  *,
  axis_name: str,
) -> jax.Array:
  """The `count` inputs before this shard, [B, count, D]: one exchange with the next device.

  Before the whole sequence come `first`, zeros if None. Inputs of another document than that of
  this shard's first token are zero.

  Raises:
    ValueError: a shard has fewer than `count` tokens, or `axis_name` is not a mapped axis.
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
    received = _from_shard_before(sent, axis_name)
  else:
    ids = digits(jnp.asarray(checked_integers(_NAME, "segment_ids", segment_ids)), x.dtype)
    both = jnp.concatenate([sent, ids[:, T - count :]], axis=-1)
    received, received_ids = jnp.split(_from_shard_before(both, axis_name), [D], axis=-1)
    same = jnp.all(received_ids == ids[:, :1], axis=-1, keepdims=True)
    # All tokens between must be of the document too: an id may come back.
    same = jnp.flip(jnp.cumprod(jnp.flip(same, 1).astype(jnp.int32), axis=1), 1)
    received = jnp.where(same > 0, received, 0)
  return jnp.where(index == 0, first.astype(x.dtype), received)


def continues(
  first: jax.Array,  # [B] bool
  segment_ids: jax.Array | None,  # [B, T] integer
  *,
  axis_name: str,
) -> jax.Array:
  """[B]: whether this shard's first token continues a document of the one before; shard 0: `first`.

  Raises:
    ValueError: `axis_name` is not a mapped axis.
  """
  index, _ = place(axis_name)
  if segment_ids is None:
    return first | (index > 0)
  ids = jnp.asarray(checked_integers(_NAME, "segment_ids", segment_ids))
  same = _from_shard_before(ids[:, -1], axis_name) == ids[:, 0]
  return jnp.where(index == 0, first, same)


def of_last(tree: Any, *, axis_name: str) -> Any:
  """The arrays of the last shard, on all devices: one all-reduce, none where nothing reads them."""
  return _of(place(axis_name)[1] - 1, tree, axis_name)


def of_first(tree: Any, *, axis_name: str) -> Any:
  """The arrays of the first shard, likewise."""
  return _of(0, tree, axis_name)


def of_next(x: jax.Array, *, axis_name: str) -> jax.Array:
  """x of the shard after this one; zeros in the last."""
  _, count = place(axis_name)
  return jax.lax.ppermute(x, axis_name, [(j + 1, j) for j in range(count - 1)])


def step_positions(
  batch: int,
  length: int,
  segment_ids: jax.Array | None,  # [B, T] integer
  before: jax.Array | None,  # [B] integer
  *,
  axis_name: str | None,
) -> tuple[jax.Array, jax.Array]:
  """Position of each token in its document, [B, T] int32, and the length of the last one, [B].

  The length is that of the last document of the whole sequence. `before` is how many tokens of the
  first document are before the sequence; None means 0. Without segments nothing is exchanged.

  Raises:
    ValueError: shapes do not agree, or `axis_name` is not a mapped axis.
  """
  segments = segments_of(_NAME, segment_ids, batch, length)
  if before is None:
    before = jnp.zeros(batch, jnp.int32)
  check_shape(_NAME, "before", before, (batch,), "[B]")
  if axis_name is None:
    position = positions(segments, batch, length, before)
    return position, position[:, -1] + 1
  number, count = place(axis_name)
  if segments is None:
    position = positions(None, batch, length, before + number * length)
    return position, before + count * length
  in_last = jnp.sum(segments.in_last(), axis=1, dtype=jnp.int32)
  entering, final = states(axis_name, in_last, before, lambda steps, state: state + steps, segments)
  return positions(segments, batch, length, entering), final


def _of(number, tree, axis_name):
  index, _ = place(axis_name)
  return jax.tree.map(
    lambda x: jax.lax.psum(jnp.where(index == number, x, jnp.zeros_like(x)), axis_name), tree
  )


def _from_shard_before(x, axis_name):
  """x of the shard before this one; zeros in shard 0."""
  count = jax.lax.axis_size(axis_name)
  return jax.lax.ppermute(x, axis_name, [(j, j + 1) for j in range(count - 1)])


def _check_length(length, count, axis_name):
  if length < count:
    raise ValueError(
      f"{_NAME}: a shard of the sequence has {length} tokens, but {count} tokens before each shard "
      f"are needed; shard over fewer devices of axis {axis_name!r}, or take longer sequences."
    )

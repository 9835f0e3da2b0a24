"""Right-padded batches, rows that end at lengths of their own; and lengths that are symbols.

Outputs are causal, so padding after a row's last token changes its state only. No recurrence needs
to know about it, because two things hold for all of them: a state is reset where a document begins,
and a sequence may be split anywhere. The second lets a computation that needs to know the length
run on sequences of any.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.mixers.common.capacity import check_capacity
from lnssm_jax.ops.core.checks import check_shape, checked_integers
from lnssm_jax.ops.core.segments import Segments, segments_of
from lnssm_jax.ops.core.symbolic import UNIT

# (x [B, T, ...], state or None, segment ids or None) -> (y [B, T, ...], state).
type Run = Callable[[jax.Array, Any, jax.Array | None], tuple[jax.Array, Any]]


def checked_lengths(
  name: str, lengths: Any, x: jax.Array, dropout_key: Any, sequence_axis: str | None
) -> jax.Array | np.ndarray:
  """`lengths` of the rows of x [B, T, ...] as int32 [B], between 0 and T; NumPy's if known.

  Raises:
    ValueError: a shape, dtype or known value is wrong, or there is a `dropout_key`.
    NotImplementedError: time is sharded.
  """
  B, T = x.shape[:2]
  lengths = checked_integers(name, "lengths", lengths)
  check_shape(name, "lengths", lengths, (B,), "[B]")
  if dropout_key is not None:
    raise ValueError(
      f"{name}: lengths and dropout_key are both given; padding on the right does not change the "
      "outputs of tokens, so leave lengths out in training."
    )
  if sequence_axis is not None:
    raise NotImplementedError(
      f"{name}: lengths of a sequence that is sharded over devices (sequence_axis="
      f"{sequence_axis!r}) are not supported; shard the batch, or keep the sequence whole."
    )
  if not isinstance(lengths, jax.core.Tracer):
    known = np.asarray(lengths)
    if known.min() < 0 or known.max() > T:
      wrong = known[(known < 0) | (known > T)][0]
      raise ValueError(
        f"{name}: lengths has the value {wrong}; it counts the tokens of a row, from 0 to T={T}."
      )
    return known.astype(np.int32)
  return jnp.clip(lengths.astype(jnp.int32), 0, T)


def run_rows(
  name: str,
  run: Run,
  x: jax.Array,
  state: Any,
  segment_ids: jax.Array | None,
  lengths: jax.Array | np.ndarray,
  empty: Any,
  *,
  batch_axis: int = 0,
  max_length: int | None = None,
) -> tuple[jax.Array, Any]:
  """(y, zeros at padding; the state after each row's own last token) of a right-padded batch.

  From the start of a sequence one call of `run` does it: rows are moved to the right, and the
  padding before them is a document of its own. A given state would end there, so it is carried
  through calls on 1, 2, 4, ... tokens, of which a row takes those that make up its length: at most
  twice the work.

  Args:
    run: reads x from a state, or with None from the start; it need not know any length.
    lengths: [B] int32, from 0 to T.
    empty: the state before the first token, whose arrays have B on `batch_axis`.
    max_length: the longest sequence that `run` accepts, or None.

  Raises:
    ValueError: `segment_ids` is wrong, or a length is known to exceed `max_length`.
  """
  segments = segments_of(name, segment_ids, *x.shape[:2])
  if state is not None:
    return _continued(run, x, state, segments, lengths, empty, batch_axis)
  if max_length is not None and isinstance(lengths, np.ndarray):
    check_capacity(name, int(lengths.max()), None, segment_ids, max_length)
  time = jnp.arange(x.shape[1])
  padding = (x.shape[1] - lengths)[:, None]
  documents = jnp.int32(1) if segments is None else 1 + _taken(segments.index, time - padding)
  moved = _where(time >= padding, _taken(x, time - padding), 0)
  y, last = run(moved, None, jnp.where(time >= padding, documents, 0))
  y = without_padding(_taken(y, time + padding), lengths)
  return y, _of_rows(lengths > 0, last, empty, batch_axis)


def run_units(
  run: Run, x: jax.Array, state: Any, segment_ids: jax.Array | None, empty: Any
) -> tuple[jax.Array, Any]:
  """`run(x, state, segment_ids)`, called on `UNIT` tokens at a time, of which T is a multiple.

  Args:
    empty: the state [B, ...] before the first token.
  """
  B = x.shape[0]
  units = lambda z: jnp.moveaxis(z.reshape(B, -1, UNIT, *z.shape[2:]), 1, 0)

  def unit(carry, inputs):
    (state, last), (x, ids) = carry, inputs
    if ids is not None:  # the state belongs to the first segment of a call
      state, last = _of_rows(ids[:, 0] == last, state, empty, 0), ids[:, -1]
    y, state = run(x, state, ids)
    return (state, last), y

  state = empty if state is None else state
  after = jax.eval_shape(run, x[:, :UNIT], state, None)[1]  # may be wider
  state = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), state, after)
  last = None if segment_ids is None else segment_ids[:, 0]
  (state, _), y = jax.lax.scan(unit, (state, last), jax.tree.map(units, (x, segment_ids)))
  return jnp.moveaxis(y, 0, 1).reshape(B, -1, *y.shape[3:]), state


def flipped(x: jax.Array, lengths: jax.Array | np.ndarray | None) -> jax.Array:
  """x [B, T, ...] with the tokens of each row in reverse order; padding stays where it is."""
  if lengths is None:
    return x[:, ::-1]
  time, ends = jnp.arange(x.shape[1]), lengths[:, None]
  return _taken(x, jnp.where(time < ends, ends - 1 - time, time))


def without_padding(x: jax.Array, lengths: jax.Array | np.ndarray | None) -> jax.Array:
  """x [B, T, ...], 0 at padding."""
  if lengths is None:
    return x
  return _where(jnp.arange(x.shape[1]) < lengths[:, None], x, 0)


def _continued(run, x, state, segments: Segments | None, lengths, empty, batch_axis):
  """`run_rows` after a state."""
  B, T = x.shape[:2]
  done, y = jnp.zeros(B, jnp.int32), jnp.zeros(0)
  for size in (1 << n for n in reversed(range(T.bit_length()))):
    takes = (lengths & size) > 0
    places = done[:, None] + jnp.arange(size)
    ids = None
    if segments is not None:
      ids = _taken(segments.index, places)
      begins = _taken(segments.first(), done[:, None])[:, 0]
      state = _of_rows(takes & begins, empty, state, batch_axis)
    out, after = run(_where(takes[:, None], _taken(x, places), 0), state, ids)
    state = _of_rows(takes, after, state, batch_axis)
    y = y if y.size else jnp.zeros((B, T, *out.shape[2:]), out.dtype)
    places = jnp.where(takes[:, None], places, T)  # outside: not written
    y = y.at[jnp.arange(B)[:, None], places].set(out, mode="drop")
    done = done + jnp.where(takes, size, 0)
  return y, state


def _taken(x, places):
  """x [B, T, ...] at places [B, C] of each row; those outside give its first or last."""
  places = jnp.clip(places, 0, x.shape[1] - 1)
  return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)


def _where(mask, x, other):
  """`where` of a mask [B, T] and x [B, T, ...]."""
  return jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - 2)), x, other)


def _of_rows(rows, state, other, batch_axis):
  """The state of `rows` [B], and for the rest the other one."""
  mask = lambda leaf: rows.reshape(*(1,) * batch_axis, -1, *(1,) * (leaf.ndim - 1 - batch_axis))
  return jax.tree.map(lambda leaf, rest: jnp.where(mask(leaf), leaf, rest), state, other)

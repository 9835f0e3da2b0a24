"""State passing between shards of a sequence: one all-gather of each shard's summary.

Device j of n has the j-th shard of the tokens. It summarizes what that shard does to the state,
S -> A_j S + b_j, without knowing S. All summaries are gathered at once, and every device applies
those of the shards before its own to the initial state. The state after the last shard follows from
the same gathered numbers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.segments import Segments

Tree = Any


def place(axis_name: str) -> tuple[jax.Array, int]:
  """(The number of this shard of the sequence, how many shards there are.)

  Raises:
    ValueError: `axis_name` is not an axis that a surrounding `shard_map` maps over.
  """
  try:
    return jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
  except NameError as error:
    raise ValueError(
      f"axis_name={axis_name!r} is not a mapped axis here; call this inside jax.shard_map over a "
      f"mesh with an axis {axis_name!r}, over which the time axis of the arguments is sharded."
    ) from error


def states(
  axis_name: str,
  summary: Tree,
  initial: Tree,  # arrays [B, ...]
  advance: Callable[[Tree, Tree], Tree],
  segments: Segments | None,
  *,
  empty: Tree = None,
  reverse: bool = False,
) -> tuple[Tree, Tree]:
  """The state that enters this shard of the sequence, and the one after the whole sequence.

  One all-gather of all arrays of `summary`, whose transpose is one reduce-scatter. What is gathered
  does not grow with T.

  Args:
    summary: what this shard does, or, of several documents, what the last of them does.
    initial: the state before the whole sequence, the same on all devices.
    advance: (summary, the entering state) -> the state after the shard. It is given `empty` where
      a boundary lies inside the shard.
    segments: those of this shard, or None.
    empty: the state of an empty sequence; None means zeros.
    reverse: whether the recurrence runs from the last token to the first.

  Returns:
    (entering, final). For the types of `shard_map`, `final` is the same on all devices.
  """
  index, count = place(axis_name)
  empty = jax.tree.map(jnp.zeros_like, initial) if empty is None else empty
  ends = None if segments is None else segments.ends(reverse=reverse)
  packed, unpack = _pack((summary, ends))

  def run(to):
    gathered = jax.lax.all_gather(packed, axis_name, to=to)  # [n, numbers]
    state, last, entering = initial, None, []
    for j in range(count):
      shard, ends = unpack(gathered[count - 1 - j if reverse else j])
      if ends is not None and last is not None:
        state = _forget(jnp.any(ends.first != last, axis=1), state, empty)
      entering.append(state)
      if ends is not None:
        state, last = _forget(ends.several[:, 0], state, empty), ends.last
      state = advance(shard, state)
    return entering, state

  # Both are one operation in the compiled program: equal gathers of the same array.
  entering, _ = run("varying")
  _, final = run("invarying")
  index = count - 1 - index if reverse else index
  own = entering[0]
  for j in range(1, count):
    own = jax.tree.map(lambda x, y, here=index == j: jnp.where(here, y, x), own, entering[j])
  return own, final


def _forget(where, state, empty):
  """`empty` in the rows of the batch where `where` [B] holds."""
  mask = lambda x: where.reshape(where.shape + (1,) * (x.ndim - 1))
  return jax.tree.map(lambda x, none: jnp.where(mask(x), none, x), state, empty)


def _pack(tree):
  """All arrays as one vector of their widest real dtype, and the inverse function."""
  leaves, structure = jax.tree.flatten(tree)
  is_complex = [jnp.iscomplexobj(x) for x in leaves]
  flat = [_real(x, c).reshape(-1) for x, c in zip(leaves, is_complex, strict=True)]
  wide = functools.reduce(jnp.promote_types, [x.dtype for x in flat])
  ends, shapes = [], []
  for x, c in zip(leaves, is_complex, strict=True):
    shapes.append((x.shape, x.dtype, c))
    ends.append((ends[-1] if ends else 0) + math.prod(x.shape) * (1 + c))

  def unpack(vector):
    pieces = jnp.split(vector, ends[:-1])
    return jax.tree.unflatten(
      structure, [_shaped(*pair) for pair in zip(pieces, shapes, strict=True)]
    )

  return jnp.concatenate([x.astype(wide) for x in flat]), unpack


def _real(x, is_complex):
  return jnp.stack([x.real, x.imag]) if is_complex else x


def _shaped(piece, shape_dtype_complex):
  shape, dtype, is_complex = shape_dtype_complex
  if is_complex:
    real, imag = piece.reshape(2, *shape)
    return jax.lax.complex(real, imag).astype(dtype)
  return piece.reshape(shape).astype(dtype)

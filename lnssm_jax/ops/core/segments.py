"""Document boundaries: the one object that says what no state and no score may cross.

A row of a batch may hold several documents ("segments"), told apart by `segment_ids`. At a boundary
two things happen together: no later token reads an earlier document, and the state that is carried
along is reset. Every op, form and kernel takes both from here:

* token by token: `Segments.first`;
* chunk by chunk: `Segments.chunks`, whose `read` and `write` mask what a chunk exchanges with the
  states that enter and leave it, each together with its other half;
* shard by shard: `Segments.in_last` and `Segments.ends`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.core.checks import check_shape, checked_integers


class Segments(NamedTuple):
  """The documents of a batch of packed rows, a document wherever `ids` changes."""

  index: jax.Array  # [B, T] int32, numbers each row's documents 0, 1, ...
  ids: jax.Array  # [B, T], as the caller numbered them: comparable between shards

  def first(self, *, reverse: bool = False) -> jax.Array:
    """[B, T]: whether the state is reset before a token: the first of every document but a row's
    first, which continues the initial state. With `reverse`, time runs backwards: the last token of
    every document but a row's last.
    """
    return _first(self.ids, reverse=reverse)

  def in_last(self) -> jax.Array:
    """[B, T]: whether a token is in its row's last document, the one that the last state sums."""
    return self.index == self.index[:, -1:]

  def several(self) -> jax.Array:
    """[B, 1]: whether a boundary lies inside the row, so that no state passes through it."""
    return self.index[:, -1:] > 0

  def bounds(self) -> tuple[jax.Array, jax.Array]:
    """([B, T] int32, likewise): the first token of each token's document, and the one after it.

    Tokens of each row are counted 0, 1, ...
    """
    length = self.ids.shape[1]
    token = jnp.arange(length, dtype=jnp.int32)
    # From both sides in one scan, which is three small kernels on a GPU.
    first = jnp.stack([_first(self.ids), _first(self.ids[:, ::-1])])
    before, after = jax.lax.cummax(jnp.where(first, token, 0), axis=2)
    return before, length - after[:, ::-1]

  def chunks(self, size: int) -> "ChunkSegments":
    """The same for chunks of `size` tokens; padding belongs to each row's last document."""
    token = jnp.pad(self.index, ((0, 0), (0, -self.index.shape[1] % size)), mode="edge")
    token = token.reshape(self.index.shape[0], -1, size).transpose(1, 0, 2)[:, :, None]
    leaving = token[..., -1:]
    entering = jnp.concatenate([jnp.zeros_like(leaving[:1]), leaving[:-1]])
    return ChunkSegments(token, entering, leaving)

  def ends(self, *, reverse: bool = False) -> "Ends":
    """Summary of this shard for the other shards of the sequence."""
    first, last = digits(self.ids[:, 0], jnp.int32), digits(self.ids[:, -1], jnp.int32)
    return Ends(*((last, first) if reverse else (first, last)), self.several())


class ChunkSegments(NamedTuple):
  """The document of each token, and of the states that enter and leave each chunk.

  Counted as in `Segments.index`. N chunks of C tokens; the axis of size 1 is that of heads.
  """

  token: jax.Array  # [N, B, 1, C]
  entering: jax.Array  # [N, B, 1, 1]: that of the token before the chunk
  leaving: jax.Array  # [N, B, 1, 1]: that of the chunk's last token

  def read(self, queries: jax.Array) -> jax.Array:
    """Queries [N, B, H, C, X] of the entering state; 0 where it is of another document."""
    return jnp.where((self.token == self.entering)[..., None], queries, 0.0)

  def write(self, keys: jax.Array, log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Operands of the state after the chunk: keys [N, B, H, C, X], the entering state's decay.

    The two halves of the reset: keys of earlier documents are 0, and the log decay of the entering
    state, [N|1, B|1, H|1, X|1], is -inf where a boundary lies in the chunk.
    """
    keys = jnp.where((self.token == self.leaving)[..., None], keys, 0.0)
    return keys, jnp.where(self.entering == self.leaving, log_decay, -jnp.inf)

  def scores(self, scores: jax.Array) -> jax.Array:
    """Scores [N, B, H, C, C] of pairs of tokens; 0 between documents."""
    return jnp.where(self.same(), scores, 0.0)

  def same(self) -> jax.Array:
    """[N, B, 1, C, C]: whether two tokens are of one document."""
    return self.token[..., :, None] == self.token[..., None, :]


class Ends(NamedTuple):
  """The documents at the ends of a shard, in the direction of the recurrence."""

  first: jax.Array  # [B, digits], the id of the first token
  last: jax.Array  # [B, digits], that of the last token
  several: jax.Array  # [B, 1], whether a boundary lies inside the shard


def segments_of(op: str, segment_ids, batch: int, length: int) -> Segments | None:
  """Checks `segment_ids` [B, T], which may be any integers; None stays None.

  A document begins wherever the id changes, also when it changes back to an earlier one.

  Raises:
    ValueError: shape or dtype; the message begins with `op`.
  """
  if segment_ids is None:
    return None
  check_shape(op, "segment_ids", segment_ids, (batch, length), "[B, T]")
  ids = jnp.asarray(checked_integers(op, "segment_ids", segment_ids))
  return Segments(jnp.cumsum(_first(ids), axis=1, dtype=jnp.int32), ids)


def positions(segments: Segments | None, batch: int, length: int, before=None) -> jax.Array:
  """Position of each token in its document, [B, T] int32.

  Args:
    before: [B], how many tokens of the first document precede the row; None means 0.
  """
  index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
  before = 0 if before is None else before[:, None]
  if segments is None:
    return index + before
  start = jax.lax.cummax(jnp.where(segments.first(), index, 0), axis=1)
  return index - start + jnp.where(segments.index == 0, before, 0)


def digits(ids: jax.Array, dtype) -> jax.Array:
  """Integers [...] as [..., bytes]: numbers of one byte each, which are exact in every `dtype`."""
  shifts = 8 * jnp.arange(ids.dtype.itemsize, dtype=ids.dtype)
  return ((ids[..., None] >> shifts) & 255).astype(dtype)


def no_gradient(tree: Any) -> Any:
  """The cotangents of integers, which a custom backward pass has to return."""
  return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tree)


def _first(ids, *, reverse=False):
  changes = ids[:, 1:] != ids[:, :-1]
  return jnp.pad(changes, ((0, 0), (0, 1) if reverse else (1, 0)))

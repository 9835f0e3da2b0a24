"""Document boundaries in the kernels: what masks, what resets the state.

Kernels that compute by chunks get `DocumentBoundaries`: the mask inside a chunk, and what passes
from one to the next.

Kernels that keep one state per channel get `first` [B, T], set at the first token of each document,
and reset the recurrent state there. Three places need it, and each has one function here:

* inside a kernel, per token: `reset`, for the state and, in a backward pass, for its cotangent;
* between the splits of a sequence, in XLA: `in_splits`, where nothing passes a split with a first
  token in it;
* on the way into a kernel: `pack_bits` and `bit`, one word per few tokens, which is loaded ahead of
  them; `as_flags`, one int32 per token, next to what else kernels copy to SMEM per token.

Most chunks have no first token, and those are computed without a look at each token's flag.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.core.index import ChunkIndex
from pallas_kernels.core.wgmma import (
  broadcast_cols,
  broadcast_rows,
  load_col_vector,
  load_row_vector,
)


class DocumentBoundaries(NamedTuple):
  """Packed documents: the mask inside a chunk and the reset of the state between chunks.

  One object for both, outside kernels with arrays and inside them with GMEM references. A token
  attends to tokens of its own document only (`mask`), sees the state that entered its chunk if its
  document did (`sees_entering_state`), and is part of the state that leaves if its document leaves
  (`reaches_leaving_state`). A state passes a chunk only if no document begins there
  (`StateDocuments.keeps_state`). Both fields are None where a sequence is one document, one where
  a kernel needs the other alone.
  """

  segment_ids: Any  # [B, T] int32, counted from 0, padded with each row's last; or None: the mask
  reset_ids: Any  # the same: the reset

  @classmethod
  def of(cls, segment_ids: jax.Array | None) -> "DocumentBoundaries":
    """Of padded segment ids [B, T], or None."""
    return cls(segment_ids, segment_ids)

  @property
  def mask_only(self) -> "DocumentBoundaries":
    """For kernels whose decay tables hold the reset already (`scalar_decay_tables`)."""
    return self._replace(reset_ids=None)

  @property
  def reset_only(self) -> "DocumentBoundaries":
    """For kernels that read scores which are masked already."""
    return self._replace(segment_ids=None)

  # Outside kernels.

  def in_chunks(self, chunk: int) -> tuple[jax.Array, jax.Array]:
    """[B, N, C] float32, 1 or 0: tokens that see the entering state, that reach the leaving one."""
    ids = self.reset_ids.reshape(self.reset_ids.shape[0], -1, chunk)
    leaving = ids[:, :, -1:]
    entering = jnp.concatenate([jnp.zeros_like(leaving[:, :1]), leaving[:, :-1]], axis=1)
    return (ids == entering).astype(jnp.float32), (ids == leaving).astype(jnp.float32)

  def reset(self, decay: jax.Array, chunk: int) -> jax.Array:
    """The decay [B|1, H, N|1, K] of each chunk, 0 where no state passes the chunk."""
    if self.reset_ids is None:
      return decay
    sees, _ = self.in_chunks(chunk)
    return decay * sees[:, None, :, -1:]  # the last token sees the entering state

  # Inside kernels.

  def mask(self, at: ChunkIndex, mask: jax.Array) -> jax.Array:
    """[C, C] bool: `mask` without pairs of tokens of different documents."""
    same = self.same_document(at)
    return mask if same is None else mask & same

  def mask_scores(self, at: ChunkIndex, scores: Any, states: "StateDocuments | None" = None) -> Any:
    """[C, C], or several: `scores`, 0 for pairs of tokens of different documents."""
    if self.segment_ids is None:
      return scores

    def masked():
      same = self._ids(at).same_document()
      return jax.tree.map(lambda x: jnp.where(same, x, 0.0), scores)

    return _in_cut(states, scores, masked)

  def same_document(self, at: ChunkIndex) -> jax.Array | None:
    """[C, C] bool: the pairs of tokens of one document; None for all."""
    return None if self.segment_ids is None else self._ids(at).same_document()

  def load_ids(self, at: ChunkIndex) -> "DocumentIds | None":
    """Loads the documents of a chunk's tokens; None for one document."""
    return None if self.segment_ids is None else self._ids(at)

  def _ids(self, at: ChunkIndex) -> "DocumentIds":
    ids = self.segment_ids.at[at.batch, at.tokens]
    return DocumentIds(load_row_vector(ids), load_col_vector(ids))

  def sees_entering_state(self, at: ChunkIndex) -> jax.Array | None:
    """[C] float32, above 0 for tokens that see the state that enters the chunk; None for all."""
    return None if self.reset_ids is None else self._of_document(at, self._entering(at))

  def reaches_leaving_state(self, at: ChunkIndex) -> jax.Array | None:
    """[C] float32, above 0 for tokens that reach the state that leaves the chunk; None for all."""
    return None if self.reset_ids is None else self._of_document(at, self._leaving(at))

  def load_states(self, at: ChunkIndex) -> "StateDocuments | None":
    """Loads the documents of the states of a chunk; None for one document."""
    if self.reset_ids is None:
      return None
    return StateDocuments(self._entering(at), self._leaving(at))

  def select_seeing(self, at: ChunkIndex, states: "StateDocuments | None", values: Any) -> Any:
    """`values` [C, X], one or several, 0 for tokens that do not see the entering state."""
    return self._select(lambda: self.sees_entering_state(at), states, values)

  def select_reaching(self, at: ChunkIndex, states: "StateDocuments | None", values: Any) -> Any:
    """`values` [C, X], one or several, 0 for tokens that do not reach the leaving state."""
    return self._select(lambda: self.reaches_leaving_state(at), states, values)

  def _select(self, load_rows, states, values):
    if self.reset_ids is None:
      return values

    def select():
      rows = load_rows()
      return jax.tree.map(lambda x: select_rows(rows, x, jnp.zeros((), x.dtype)), values)

    return _in_cut(states, values, select)

  def _of_document(self, at: ChunkIndex, document):
    ids = load_row_vector(self.reset_ids.at[at.batch, at.tokens])
    return jnp.where(ids == document, jnp.float32(1.0), jnp.float32(0.0))

  def _entering(self, at: ChunkIndex):
    """The document of the state that enters the chunk, the first one in a row's first chunk."""
    return self.reset_ids[at.batch, jnp.maximum(at.chunk * at.size - 1, 0)]

  def _leaving(self, at: ChunkIndex):
    return self.reset_ids[at.batch, at.chunk * at.size + at.size - 1]

  def starts_with(self, at: ChunkIndex) -> tuple[jax.Array, jax.Array] | None:
    """Whether tokens [C], and the last token, are in the document of the chunk's first token."""
    if self.segment_ids is None:
      return None
    ids = self.segment_ids.at[at.batch, at.tokens]
    return load_row_vector(ids) == ids[0], ids[at.size - 1] == ids[0]


class DocumentIds(NamedTuple):
  """The documents of a chunk's tokens [C] int32, in registers."""

  rows: jax.Array
  cols: jax.Array

  def same_document(self) -> jax.Array:
    """[C, C] bool: the pairs of tokens of one document."""
    shape = self.rows.shape * 2
    return broadcast_rows(self.rows, shape) == broadcast_cols(self.cols, shape)


class StateDocuments(NamedTuple):
  """The documents of the states of a chunk, in registers."""

  entering: jax.Array  # int32: of the state that enters the chunk
  leaving: jax.Array  # int32: of the one that leaves it

  @property
  def cut(self) -> jax.Array:
    """Whether a document begins in the chunk. Else all tokens are of that of both states."""
    return self.entering != self.leaving

  def keeps_state(self, decay: jax.Array) -> jax.Array:
    """The chunk's `decay` [K], 0 if no state passes the chunk: if a document begins there."""
    return decay * jnp.where(self.cut, 0.0, 1.0)


def _in_cut(states: StateDocuments | None, value: Any, masked: Callable[[], Any]):
  """`masked()` if a document begins in the chunk; elsewhere nobody looks at its tokens."""
  return masked() if states is None else lax.cond(states.cut, masked, lambda: value)


def select_rows(rows: jax.Array | None, value: jax.Array, zero: Any = 0.0) -> jax.Array:
  """`value` [C, X], 0 in rows that are not above 0, whatever they hold; all rows for None."""
  if rows is None:
    return value
  return jnp.where(broadcast_rows(rows, value.shape) > 0, value, zero)


# Kernels that keep one state per channel


def select(flag, tree, otherwise):
  """`tree` where `flag`, else `otherwise`; `flag` None means False.

  A selection, not a product: NaN and infinity do not pass.
  """
  if flag is None:
    return otherwise
  return jax.tree.map(lambda x, y: jnp.where(flag, x, y), tree, otherwise)


def reset(is_first, state, empty):
  """The state that a token reads: `empty` at the first token of a document.

  Args:
    is_first: a boolean scalar, or None where there are no boundaries.
    state: an array or a tree of arrays; `empty` likewise.
  """
  return select(is_first, empty, state)


def in_splits(first: jax.Array | None, num_splits: int) -> jax.Array | None:
  """[B, num_splits, 1]: whether a document begins in a split, so that no state passes it."""
  if first is None:
    return None
  return jnp.any(first.reshape(first.shape[0], num_splits, -1), axis=2)[..., None]


def as_flags(first: jax.Array | None, chunk: int) -> jax.Array | None:
  """[B, T] int32, which copies to SMEM take: above 0 for first tokens, else 0.

  But -1 for a chunk's first token if a document begins after it: it is 0 in uncut chunks only.
  """
  if first is None:
    return None
  chunks = first.reshape(first.shape[0], -1, chunk).astype(jnp.int32)
  place = jnp.arange(chunk)
  later = (place == 0) & jnp.any(chunks[:, :, 1:] > 0, axis=2, keepdims=True)
  return jnp.where((chunks == 0) & later, -1, chunks).reshape(first.shape)


def pack_bits(first: jax.Array | None, tokens: int) -> jax.Array | None:
  """[B, T / tokens, rounded up] int32: one bit per token, `tokens` of them in a word."""
  if first is None:
    return None
  B, T = first.shape
  first = jnp.pad(first, ((0, 0), (0, -T % tokens))).reshape(B, -1, tokens)
  bits = first.astype(jnp.int32) << jnp.arange(tokens, dtype=jnp.int32)
  return jnp.sum(bits, axis=2, dtype=jnp.int32)


def bit(word, n):
  """Token n's flag in a word of `pack_bits`; None without boundaries."""
  return None if word is None else (word >> n) & 1 != 0

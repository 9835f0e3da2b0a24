"""Types of `attention`: its key-value cache, its mask, its arguments once they are checked."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from lnssm_jax import typing as ty
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.spmd import with_axes
from lnssm_jax.ops.core.states import register_state
from lnssm_jax.ops.core.symbolic import UNIT


@register_state
class AttentionState(NamedTuple):
  """The keys and values that later tokens can see, in the dtypes of k and v.

  M is window - 1 with a window, block - 1 with blocks, else the number of tokens so far.
  """

  k: jax.Array  # [B, M, G, K], token p of the document in slot p mod M
  v: jax.Array  # [B, M, G, V]
  position: ty.BCount  # the number of tokens of the document so far


class Tokens(NamedTuple):
  """Where tokens are: two of them see each other only in the same document."""

  position: jax.Array  # [B, T] int32, counted in the document from 0
  document: jax.Array  # [B, T] int32, from 0; below 0 for padding and empty slots


class Mask(NamedTuple):
  """Which tokens of its document a query sees."""

  window: int | None
  block: int | None
  causal: bool

  @property
  def room(self) -> int | None:
    """Tokens that a cache keeps; None: all."""
    size = self.window or self.block
    return None if size is None else size - 1

  def reach(self, length: Any) -> Any:
    """Largest distance of two of `length` tokens that see each other, plus 1; or more, `length`.

    A length that is a symbol may be less than a window, or not.
    """
    size = self.window or self.block
    if size is None or (is_symbolic_dim(length) and size > UNIT):
      return length
    return min(size, length)

  def visible(self, queries: Tokens, keys: Tokens) -> jax.Array:
    """[..., T, S] for tokens [..., T] and [..., S]."""
    query, key = queries.position[..., :, None], keys.position[..., None, :]
    seen = queries.document[..., :, None] == keys.document[..., None, :]
    if self.causal:
      seen &= key <= query
    if self.window is not None:
      seen &= jnp.abs(query - key) < self.window
    if self.block is not None:
      seen &= query // self.block == key // self.block
    return seen


@with_axes
class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  q: Annotated[jax.Array, "BTHK"]
  k: Annotated[jax.Array, "BTHK"]  # [B, T, G, K]
  v: Annotated[jax.Array, "BTHV"]  # [B, T, G, V]
  state: Annotated[AttentionState | None, "BMHK"]
  segments: Annotated[Segments | None, "BT"]
  dropout_keys: Annotated[jax.Array | None, "BTH"] = None  # [B, T, H, 2] uint32
  sinks: Annotated[jax.Array | None, "H"] = None


class Options(NamedTuple):
  """Static arguments."""

  mask: Mask
  scale: float
  chunk_size: int | None = None
  soft_cap: float | None = None
  dropout: float = 0.0

  def capped(self, scores: jax.Array) -> jax.Array:
    """`scale` times the products of queries and keys, within +-`soft_cap`."""
    scores = self.scale * scores
    return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)


def init_state(
  *,
  batch: int,
  kv_heads: int,
  key_dim: int,
  value_dim: int | None = None,
  window: int | None = None,
  block: int | None = None,
  dtype=jnp.float32,
) -> AttentionState:
  """The empty cache: of fixed size with a window or blocks, else without slots yet.

  A cache of fixed size for full attention over at most L tokens is that of `window=L`: up to L
  tokens a window of L hides nothing.
  """
  room = Mask(window, block, causal=True).room or 0
  value_dim = key_dim if value_dim is None else value_dim
  return AttentionState(
    jnp.zeros((batch, room, kv_heads, key_dim), dtype),
    jnp.zeros((batch, room, kv_heads, value_dim), dtype),
    jnp.zeros(batch, jnp.int32),
  )

"""Types of `sparse_state_attention`: its recurrent state, and its checked arguments."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.states import register_state

Method = Literal["mask", "varlen", "gather"]


@register_state
class SparseState(NamedTuple):
  """Recurrent state of each partition after the last token. float32 (or float64)."""

  kv: jax.Array  # [B, N, H, K, V], of the tokens that used the partition


class Inputs(NamedTuple):
  """The arguments in the form that every method takes."""

  q: jax.Array  # [B, T, H, K]
  k: jax.Array  # [B, T, S|1, H, K]
  v: jax.Array  # [B, T, S|1, H, V]
  indices: jax.Array  # [B, T, S] int32, N where nothing is selected
  write: jax.Array  # [B, T, S], the gates of the keys
  read: jax.Array  # [B, T, S], the gates of the queries
  log_decay: jax.Array | None  # [B|1, T|1, S|1, H, K|1]
  beta: jax.Array | None  # [B, T, S|1, H, 1], the rates of the delta rule
  state: SparseState
  segments: Segments | None


class Options(NamedTuple):
  """Static arguments."""

  scale: float
  method: Method | None
  chunk_size: int | None = None
  fresh: bool = False  # there is no initial state
  # The form of the linear attention, or delta rule, inside; None: the best.
  implementation: Literal["chunked", "associative", "reference"] | None = "chunked"


def init_state(
  *, batch: int, num_partitions: int, heads: int, key_dim: int, value_dim: int, dtype=jnp.float32
) -> SparseState:
  """The empty state: zeros."""
  return SparseState(jnp.zeros((batch, num_partitions, heads, key_dim, value_dim), dtype))

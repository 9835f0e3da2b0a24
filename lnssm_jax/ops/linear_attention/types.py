"""Types of `linear_attention`: its recurrent state, and its arguments once they are checked."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.spmd import with_axes
from lnssm_jax.ops.core.states import register_state


@register_state
class LinearAttentionState(NamedTuple):
  """Recurrent state after the last token. float32 (float64 for float64 inputs)."""

  kv: ty.BHKV  # the decayed sum of k v^T
  key_sum: ty.BHK | None = None  # the decayed sum of k; None without the normalizer


@with_axes
class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  # Arrays with an axis H may have fewer heads, as in `core/grouped_heads.py`.
  q: Annotated[jax.Array, "BTHK"]
  k: Annotated[jax.Array, "BTHK"]
  v: Annotated[jax.Array, "BTHV"]
  log_decay: Annotated[jax.Array, "BTHK"]  # broadcastable to [B, T, H, K], float32; 0 without decay
  value_log_decay: Annotated[jax.Array | None, "BTHV"]  # broadcastable to [B, T, H, V], float32
  bonus: Annotated[jax.Array | None, "HK"]
  state: Annotated[LinearAttentionState, "BH"]  # with both fields
  segments: Annotated[Segments | None, "BT"]
  own_weight: Annotated[jax.Array | None, "BTH"] = None  # float32


RESULT_AXES = ("BTHV", "BH")  # of the output and of the state's arrays


class Options(NamedTuple):
  """Static arguments.

  `fresh`: the state is zero and needs no reading. `rank`: rows of a token, see `ranks.py`.
  """

  normalize: bool
  scale: float
  chunk_size: int | None = None
  fresh: bool = False
  rank: int = 1


def init_state(
  *,
  batch: int,
  heads: int,
  key_dim: int,
  value_dim: int,
  normalize: bool = False,
  dtype=jnp.float32,
) -> LinearAttentionState:
  """The empty state: zeros, with `key_sum` for calls with `normalize`."""
  kv = jnp.zeros((batch, heads, key_dim, value_dim), dtype)
  return LinearAttentionState(kv, jnp.zeros(kv.shape[:3], dtype) if normalize else None)

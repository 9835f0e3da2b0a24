"""Types of `linear_attention`: its recurrent state, and its arguments once they are checked."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.states import register_state


@register_state
class LinearAttentionState(NamedTuple):
  """Recurrent state after the last token. float32 (float64 for float64 inputs)."""

  kv: ty.BHKV  # the decayed sum of k v^T
  key_sum: ty.BHK | None = None  # the decayed sum of k; None without the normalizer


class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  # Arrays with an axis H may have fewer heads, as in `core/grouped_heads.py`.
  q: jax.Array  # [B, T, H, K]
  k: jax.Array  # [B, T, H, K]
  v: jax.Array  # [B, T, H, V]
  log_decay: jax.Array  # broadcastable to [B, T, H, K], float32; 0 without decay
  value_log_decay: jax.Array | None  # broadcastable to [B, T, H, V], float32
  bonus: jax.Array | None  # [H, K]
  state: LinearAttentionState  # with both fields
  segments: Segments | None
  own_weight: jax.Array | None = None  # [B, T, H], float32

  AXES = {  # noqa: RUF012
    "q": "BTHK",
    "k": "BTHK",
    "v": "BTHV",
    "log_decay": "BTHK",
    "value_log_decay": "BTHV",
    "bonus": "HK",
    "state": "BH",
    "segments": "BT",
    "own_weight": "BTH",
  }


RESULT_AXES = ("BTHV", "BH")  # of the output and of the state's arrays


class Options(NamedTuple):
  """Static arguments. `fresh`: the state is zero and needs no reading."""

  normalize: bool
  scale: float
  chunk_size: int | None = None
  fresh: bool = False


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

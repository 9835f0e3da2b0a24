"""Types of `delta_rule`: its recurrent state, and its arguments once they are checked."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.states import register_state


@register_state
class DeltaRuleState(NamedTuple):
  """Recurrent state after the last token. float32 (float64 for float64 inputs)."""

  kv: ty.BHKV  # the map from keys to values learned so far


class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  # Arrays with an axis H may have fewer heads, as in `core/grouped_heads.py`.
  q: jax.Array  # [B, T, H, K]
  k: jax.Array  # [B, T, H, K]
  v: jax.Array  # [B, T, H, V]
  beta: jax.Array  # [B, T, H, 1 or V], float32
  log_decay: jax.Array  # [B, T, H, 1 or K], float32; 0 without decay
  erase_key: jax.Array | None  # [B, T, H, K]; None for k itself
  write_key: jax.Array | None  # [B, T, H, K]; None for k itself
  state: DeltaRuleState
  segments: Segments | None

  AXES = {  # noqa: RUF012
    "q": "BTHK",
    "k": "BTHK",
    "v": "BTHV",
    "beta": "BTHV",
    "log_decay": "BTHK",
    "erase_key": "BTHK",
    "write_key": "BTHK",
    "state": "BH",
    "segments": "BT",
  }

  @property
  def erase(self) -> jax.Array:
    """The vector that reads the old value, [B, T, H, K]."""
    return self.k if self.erase_key is None else self.erase_key


RESULT_AXES = ("BTHV", "BH")  # of the output and of the state's arrays


class Options(NamedTuple):
  """Arguments that are not arrays. `fresh`: the state is zero and needs no reading."""

  scale: float
  chunk_size: int | None = None
  erase_before_decay: bool = False  # the old value is read before the state decays
  fresh: bool = False


def init_state(
  *,
  batch: int,
  heads: int,
  key_dim: int,
  value_dim: int,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> DeltaRuleState:
  """The empty state: zeros."""
  return DeltaRuleState(jnp.zeros((batch, heads, key_dim, value_dim), dtype))

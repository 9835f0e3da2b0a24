"""Types of `delta_rule`: its recurrent state, and its arguments once they are checked."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.spmd import with_axes
from lnssm_jax.ops.core.states import register_state


@register_state
class DeltaRuleState(NamedTuple):
  """Recurrent state after the last token. float32 (float64 for float64 inputs)."""

  kv: ty.BHKV  # the map from keys to values learned so far


@with_axes
class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  # Arrays with an axis H may have fewer heads, as in `core/grouped_heads.py`.
  q: Annotated[jax.Array, "BTHK"]
  k: Annotated[jax.Array, "BTHK"]
  v: Annotated[jax.Array, "BTHV"]
  beta: Annotated[jax.Array, "BTHV"]  # [B, T, H, 1 or V], float32
  log_decay: Annotated[jax.Array, "BTHK"]  # [B, T, H, 1 or K], float32; 0 without decay
  erase_key: Annotated[jax.Array | None, "BTHK"]  # None for k itself
  write_key: Annotated[jax.Array | None, "BTHK"]  # None for k itself
  state: Annotated[DeltaRuleState, "BH"]
  segments: Annotated[Segments | None, "BT"]

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

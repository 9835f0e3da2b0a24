"""Types of `wkv4`: its recurrent state, and its arguments once they are checked."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.spmd import with_axes
from lnssm_jax.ops.core.states import register_state

# An empty state's maximum. Finite, so that no difference of two of them is a NaN, and far enough
# down that exp(EMPTY - anything) is exactly 0.
EMPTY = -1e38


@register_state
class WKV4State(NamedTuple):
  """Two decayed sums, both divided by exp(max). float32 (float64 for float64 inputs).

  The sums of exp(k) v and of exp(k) are exp(max) numerator and exp(max) denominator. `max` is a
  scale, not a quantity: two states are the same if these products are.
  """

  max: ty.BD
  numerator: ty.BD
  denominator: ty.BD


@with_axes
class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  k: Annotated[jax.Array, "BTD"]
  v: Annotated[jax.Array, "BTD"]
  decay_rate: Annotated[jax.Array, "D"]
  bonus: Annotated[jax.Array, "D"]
  state: Annotated[WKV4State, "BD"]
  segments: Annotated[Segments | None, "BT"]

  @property
  def keep(self) -> jax.Array | None:
    """[B, T, 1]: False where the state is reset before a token; None if it never is."""
    return None if self.segments is None else ~self.segments.first()[..., None]


RESULT_AXES = ("BTD", "BD")  # of the output and of the state's arrays


class Options(NamedTuple):
  """Arguments that are not arrays."""

  chunk_size: int | None = None


def init_state(*, batch: int, dim: int, dtype: jax.typing.DTypeLike = jnp.float32) -> WKV4State:
  """The empty state of `dim` channels: both sums 0."""
  zeros = jnp.zeros((batch, dim), dtype)
  return WKV4State(jnp.full_like(zeros, EMPTY), zeros, zeros)

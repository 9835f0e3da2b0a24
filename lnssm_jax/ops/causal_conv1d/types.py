"""Types of `causal_conv1d`: its state, and its arguments once they are checked."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.spmd import axes_of, with_axes
from lnssm_jax.ops.core.states import register_state


@register_state
class ConvState(NamedTuple):
  """The last W - 1 inputs, oldest first; zeros before the document. float32 (or float64)."""

  inputs: ty.BWD


@with_axes
class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  x: Annotated[jax.Array, "BTD"]
  kernel: Annotated[jax.Array, "SWD"]  # [S, W, D]: S convolutions of x
  bias: Annotated[jax.Array | None, "D"]
  # Of `token_shift`: S columns of D channels. C is S D: each device has all of them.
  offsets: Annotated[jax.Array | None, "BTC"]
  state: Annotated[ConvState | None, "BWD"]  # None: zeros
  segments: Annotated[Segments | None, "BT"]


RESULT_AXES = ("BTD", "BWD")  # of each of the S outputs and of the state's arrays


class ShiftInputs(Inputs):
  """Of `token_shift`, whose outputs are projected: each device has all channels, as letter V."""

  AXES = {n: axes.replace("D", "V") for n, axes in axes_of(Inputs).items()}  # noqa: RUF012


SHIFT_RESULT_AXES = ("BTV", "BWV")


class Options(NamedTuple):
  """Static arguments."""

  silu: bool  # whether y = z sigmoid(z) of the sum z
  dtype: jnp.dtype  # of y


def init_state(*, batch: int, dim: int, width: int, dtype=jnp.float32) -> ConvState:
  """The empty state for `dim` channels and a kernel of `width` tokens: zeros."""
  return ConvState(jnp.zeros((batch, width - 1, dim), dtype))

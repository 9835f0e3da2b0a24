"""Types of `longhorn_scan`: its recurrent state, and its arguments once they are checked."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core import channel_states
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.spmd import with_axes
from lnssm_jax.ops.core.states import register_state


@register_state
class LonghornState(NamedTuple):
  """Recurrent state after the last token. float32 (float64 for float64 inputs)."""

  h: ty.BDN  # the linear map from keys to inputs


@with_axes
class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  x: Annotated[jax.Array, "BTD"]
  beta: Annotated[jax.Array, "BTD"]
  k: Annotated[jax.Array, "BTN"]
  q: Annotated[jax.Array, "BTN"]
  skip: Annotated[jax.Array, "D"]  # in the dtype of the sums
  state: Annotated[LonghornState, "BDN"]
  segments: Annotated[Segments | None, "BT"]
  # Where beta = sigmoid(beta_logits + beta_bias): the kernels write the gradients by these two.
  beta_logits: Annotated[jax.Array | None, "BTD"] = None
  beta_bias: Annotated[jax.Array | None, "D"] = None  # float32 at least


def strengths(beta: jax.Array, bias: jax.Array | None, beta_sigmoid: bool) -> channel_states.Rate:
  """β of the arguments `beta`, `beta_bias` and `beta_sigmoid`."""
  activation = jax.nn.sigmoid if beta_sigmoid else None
  return channel_states.rate("longhorn_scan", "beta", beta, bias, activation, "beta_sigmoid")


def init_state(*, batch: int, dim: int, state_dim: int, dtype=jnp.float32) -> LonghornState:
  """The empty state for `dim` channels with `state_dim` numbers each: zeros."""
  return LonghornState(jnp.zeros((batch, dim, state_dim), dtype))

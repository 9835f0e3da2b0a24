"""Types of `selective_scan`: its recurrent state, and its arguments once they are checked."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core import channel_states
from lnssm_jax.ops.core.activations import softplus
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.spmd import with_axes
from lnssm_jax.ops.core.states import register_state


@register_state
class SelectiveState(NamedTuple):
  """Recurrent state after the last token. float32 (float64 for float64 inputs)."""

  h: ty.BDN  # the decayed sum of (dt x) b^T


@with_axes
class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  x: Annotated[jax.Array, "BTD"]
  dt: Annotated[jax.Array, "BTD"]
  a: Annotated[jax.Array, "DN"]  # or [D, 1], in the dtype of the sums
  b: Annotated[jax.Array, "BTN"]
  c: Annotated[jax.Array, "BTN"]
  skip: Annotated[jax.Array, "D"]  # in the dtype of the sums
  state: Annotated[SelectiveState, "BDN"]
  segments: Annotated[Segments | None, "BT"]
  # Where dt = softplus(dt_logits + dt_bias): the kernels write the gradients by these two.
  dt_logits: Annotated[jax.Array | None, "BTD"] = None
  dt_bias: Annotated[jax.Array | None, "D"] = None  # float32 at least


def step_sizes(dt: jax.Array, bias: jax.Array | None, dt_softplus: bool) -> channel_states.Rate:
  """The step sizes of the arguments `dt`, `dt_bias` and `dt_softplus`."""
  activation = softplus if dt_softplus else None
  return channel_states.rate("selective_scan", "dt", dt, bias, activation, "dt_softplus")


def has_shared_rates(inputs: Inputs) -> bool:
  """Whether the N numbers of a channel decay alike."""
  return inputs.a.shape[1] < inputs.b.shape[2]


def with_all_rates(inputs: Inputs) -> Inputs:
  """The same with `a` [D, N]."""
  return inputs._replace(a=jnp.broadcast_to(inputs.a, inputs.state.h.shape[1:]))


def init_state(*, batch: int, dim: int, state_dim: int, dtype=jnp.float32) -> SelectiveState:
  """The empty state for `dim` channels with `state_dim` numbers each: zeros."""
  return SelectiveState(jnp.zeros((batch, dim, state_dim), dtype))

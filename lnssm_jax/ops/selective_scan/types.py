"""Types of `selective_scan`: its recurrent state, and its arguments once they are checked."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core import channel_states
from lnssm_jax.ops.core.activations import softplus
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.states import register_state


@register_state
class SelectiveState(NamedTuple):
  """Recurrent state after the last token. float32 (float64 for float64 inputs)."""

  h: ty.BDN  # the decayed sum of (dt x) b^T


class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  x: jax.Array  # [B, T, D]
  dt: jax.Array  # [B, T, D]
  a: jax.Array  # [D, N] or [D, 1], in the dtype of the sums
  b: jax.Array  # [B, T, N]
  c: jax.Array  # [B, T, N]
  skip: jax.Array  # [D], in the dtype of the sums
  state: SelectiveState
  segments: Segments | None
  # Where dt = softplus(dt_logits + dt_bias): the kernels write the gradients by these two.
  dt_logits: jax.Array | None = None  # [B, T, D]
  dt_bias: jax.Array | None = None  # [D], float32 at least

  AXES = {  # noqa: RUF012
    "x": "BTD",
    "dt": "BTD",
    "a": "DN",
    "b": "BTN",
    "c": "BTN",
    "skip": "D",
    "state": "BDN",
    "segments": "BT",
    "dt_logits": "BTD",
    "dt_bias": "D",
  }


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

"""Types of `elementwise_decay_scan`: state, decay functions, and its arguments once checked."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.states import register_state


@register_state
class ElementwiseDecayState(NamedTuple):
  """Recurrent state after the last token. float32 (float64 for float64 inputs)."""

  kv: ty.BHKV  # the decayed sum of k v^T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecayFunction:
  """A log decay that is computed when and where it is needed, a few tokens at a time.

      def make(steps, parameters):  # [B, C, H, K] and [H, K, V] -> [B, C, H, K, V]
        return jax.nn.log_sigmoid(steps[..., None] * parameters)

      elementwise_decay_scan(q, k, v, DecayFunction(make, steps, parameters))

  `make` is called with some of the tokens, in order but split anywhere, so what it returns for a
  token may depend on that token only. Gradients flow to `steps` and `parameters`. Arrays that
  `make` closes over get gradients too; inside `shard_map`, or in a dtype narrower than float32,
  pass them as `parameters`.
  """

  make: Callable[[Any, Any], jax.Array] = dataclasses.field(metadata={"static": True})
  steps: Any  # arrays [B, T, ...] of any tree structure, split along time
  parameters: Any = ()  # arrays of any tree structure, passed whole


class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  q: jax.Array  # [B, T, H, K]
  k: jax.Array  # [B, T, H, K]
  v: jax.Array  # [B, T, H, V]
  log_decay: DecayFunction
  read_weight: jax.Array | None  # [H, K, V]
  state: ElementwiseDecayState
  segments: Segments | None


class Options(NamedTuple):
  """Arguments that are not arrays."""

  chunk_size: int | None = None


def init_state(
  *,
  batch: int,
  heads: int,
  key_dim: int,
  value_dim: int,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> ElementwiseDecayState:
  """The empty state: zeros."""
  return ElementwiseDecayState(jnp.zeros((batch, heads, key_dim, value_dim), dtype))

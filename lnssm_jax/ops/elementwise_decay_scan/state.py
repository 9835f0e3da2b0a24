"""The state of the scan, and a decay given as a function."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class ElementwiseDecayState(NamedTuple):
  """What a sequence leaves behind. float32 (float64 for float64 inputs)."""

  kv: jax.Array  # [B, H, K, V], the decayed sum of k v^T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecayFunction:
  """A log decay that is made when and where it is needed, a few steps at a time.

      def make(steps, parameters):  # [B, C, H, K] and [H, K, V] -> [B, C, H, K, V]
        return jax.nn.log_sigmoid(steps[..., None] * parameters)

      elementwise_decay_scan(q, k, v, DecayFunction(make, steps, parameters))

  `make` is called with some of the steps, in order but cut wherever the scan likes, so what it
  returns for a step may depend on that step only. Gradients flow to `steps` and `parameters`.
  Arrays that `make` takes from its surroundings get gradients too; inside `shard_map`, or in a
  dtype narrower than float32, hand them over as `parameters`.
  """

  make: Callable[[Any, Any], jax.Array] = dataclasses.field(metadata={"static": True})
  steps: Any  # arrays [B, T, ...] of any tree structure, cut along time
  parameters: Any = ()  # arrays of any tree structure, handed over whole

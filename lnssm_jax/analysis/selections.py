"""Which partitions the tokens of a text select, in mixers that route (`SSE`, `MoM`)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import ops
from lnssm_jax.analysis.layers import each_layer, names_of_mixers
from lnssm_jax.mixers import Mixer
from lnssm_jax.mixers.common.routing import is_selected
from lnssm_jax.models import LanguageModel

_NAME = "analysis"


class Routing(NamedTuple):
  """Selections of one layer, of N partitions k per token."""

  share: jax.Array  # float32 [N], the share of tokens that write to a partition; their sum is k
  by_row: jax.Array  # float32 [B, N], the same for each row of the batch
  dead: jax.Array  # bool [N], whether no token writes to it
  load: jax.Array  # float32 [], the largest share over that of equal shares, k / N; 1 is balanced
  entropy: jax.Array  # float32 [], of the shares: 1 for equal ones, 0 if all tokens agree (k = 1)


def routing(
  model: LanguageModel | Mixer, inputs: jax.Array, segment_ids: jax.Array | None = None
) -> list[Routing | None]:
  """The `Routing` of each layer on a text; None for a layer that does not route.

  Args:
    inputs: tokens [B, T] of a language model, x [B, T, D] of a mixer.

  Raises:
    ValueError: `inputs` do not fit the model.
    NotImplementedError: no layer routes.
  """
  found = each_layer(_routing, model, inputs, segment_ids)
  if all(layer is None for layer in found):
    names = names_of_mixers(model)
    raise NotImplementedError(
      f"{_NAME}: no layer routes tokens (SSE, MoM); the mixers are {names}."
    )
  return found


def _routing(mixer, x, segment_ids):
  with ops.recording() as calls:
    mixer(x, None, segment_ids)
  calls = [call for call in calls if call.op == "sparse_state_attention"]
  if not calls:
    return None
  arguments = calls[0].arguments
  written = arguments["indices"][..., : mixer.num_selected]  # the others are only read
  selected = is_selected(written, arguments["num_partitions"]).astype(jnp.float32)
  share, by_row = jnp.mean(selected, axis=(0, 1)), jnp.mean(selected, axis=1)
  N, k = selected.shape[-1], written.shape[-1]
  p = share / k
  entropy = -jnp.sum(jnp.where(share > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0))
  even = jnp.log(max(N, 2))
  return Routing(share, by_row, share == 0, jnp.max(share) * N / k, entropy / even)

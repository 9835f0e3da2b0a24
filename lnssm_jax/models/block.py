"""One layer of a model: a time mixer, then a channel mixer, each after a norm."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers import MIXERS
from lnssm_jax.models.channel_mixers import CHANNEL_MIXERS


def layer_norm(dim: int, *, param_dtype, rngs: nnx.Rngs) -> nnx.LayerNorm:
  """LayerNorm with scale and bias, eps 1e-5, in float32 throughout: the caller rounds it, once."""
  return nnx.LayerNorm(
    dim,
    epsilon=1e-5,
    dtype=jnp.float32,
    param_dtype=param_dtype,
    use_fast_variance=False,
    rngs=rngs,
  )


class Block(nnx.Module):
  """x + mixer(norm(x)), then x + channel_mixer(norm(x)): [B, T, D] -> [B, T, D] in `dtype`.

  `mixer` and `channel_mixer` are names in `MIXERS` and `CHANNEL_MIXERS`; `LanguageModel` checks
  them.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    layer: int | jax.Array,
    num_layers: int,
    mixer: str,
    mixer_options: Mapping[str, Any],
    channel_mixer: str,
    dtype,
    param_dtype,
    rngs: nnx.Rngs,
  ):
    dtypes = {"dtype": dtype, "param_dtype": param_dtype}
    self.mixer_norm = layer_norm(dim, param_dtype=param_dtype, rngs=rngs)
    self.mixer = MIXERS[mixer](
      dim,
      num_heads=num_heads,
      layer=layer,
      num_layers=num_layers,
      **mixer_options,
      **dtypes,
      rngs=rngs,
    )
    self.channel_norm = layer_norm(dim, param_dtype=param_dtype, rngs=rngs)
    self.channel_mixer = CHANNEL_MIXERS[channel_mixer](dim, **dtypes, rngs=rngs)
    self.dtype = dtype

  def __call__(self, x: jax.Array, state=None, segment_ids: jax.Array | None = None):
    """Returns (x [B, T, D], the mixer's state)."""
    with jax.named_scope("mixer"):
      y, state = self.mixer(self.mixer_norm(x).astype(self.dtype), state, segment_ids)
    x = x + y
    with jax.named_scope("channel_mixer"):
      return x + self.channel_mixer(self.channel_norm(x).astype(self.dtype)), state

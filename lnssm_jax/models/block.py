"""One layer of a model: a time mixer, then a channel mixer, each after a norm."""

import inspect
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


def mixer_arguments(mixer: str) -> Mapping[str, inspect.Parameter]:
  """The constructor's arguments of a mixer by its name in `MIXERS`, without `self`."""
  parameters = dict(inspect.signature(MIXERS[mixer].__init__).parameters)
  del parameters["self"]
  return parameters


class Block(nnx.Module):
  """x + mixer(norm(x)), then x + channel_mixer(norm(x)): [B, T, D] -> [B, T, D] in `dtype`.

  `mixer` and `channel_mixer` are names in `MIXERS` and `CHANNEL_MIXERS`; `LanguageModel` checks
  them. With the channel mixer "none" the block ends after the mixer. `num_heads`, `layer` and
  `num_layers` go to mixers that take them; `num_heads=None` leaves a mixer its own default.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int | None,
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
    place: dict[str, Any] = {"layer": layer, "num_layers": num_layers}
    if num_heads is not None:
      place["num_heads"] = num_heads
    taken = mixer_arguments(mixer)
    place = {name: value for name, value in place.items() if name in taken}
    self.mixer = MIXERS[mixer](dim, **place, **mixer_options, **dtypes, rngs=rngs)
    if (channel_mixer_class := CHANNEL_MIXERS[channel_mixer]) is None:
      self.channel_norm = self.channel_mixer = None
    else:
      self.channel_norm = layer_norm(dim, param_dtype=param_dtype, rngs=rngs)
      self.channel_mixer = channel_mixer_class(dim, **dtypes, rngs=rngs)
    self.dtype = dtype

  def __call__(self, x: jax.Array, state=None, segment_ids: jax.Array | None = None):
    """Returns (x [B, T, D], the mixer's state)."""
    with jax.named_scope("mixer"):
      y, state = self.mixer(self.mixer_norm(x).astype(self.dtype), state, segment_ids)
    x = x + y
    if self.channel_mixer is None or self.channel_norm is None:
      return x, state
    with jax.named_scope("channel_mixer"):
      return x + self.channel_mixer(self.channel_norm(x).astype(self.dtype)), state

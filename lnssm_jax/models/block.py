"""One layer of a model: a time mixer, then a channel mixer, each after a norm."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers import MIXERS, divide_time
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


def rms_norm(dim: int, *, param_dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
  """RMSNorm with a scale, eps 1e-5, in float32 throughout: the caller rounds it, once."""
  return nnx.RMSNorm(dim, epsilon=1e-5, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)


NORMS = {"layer": layer_norm, "rms": rms_norm}


class BlockState(NamedTuple):
  """What a block remembers of a sequence."""

  mixer: Any
  channel_mixer: Any  # None where it looks at one token at a time


def mixer_arguments(mixer: str) -> Mapping[str, inspect.Parameter]:
  """The constructor's arguments of a mixer by its name in `MIXERS`, without `self`."""
  parameters = dict(inspect.signature(MIXERS[mixer].__init__).parameters)
  del parameters["self"]
  return parameters


class Block(nnx.Module):
  """x + mixer(norm(x)), then x + channel_mixer(norm(x)): [B, T, D] -> [B, T, D] in `dtype`.

  `mixer` and `channel_mixer` are names in `MIXERS` and `CHANNEL_MIXERS`; `LanguageModel` checks
  them. With the channel mixer "none" the block ends after the mixer. `num_heads`, `layer` and
  `num_layers` go to mixers that take them; `num_heads=None` leaves a mixer its own default. `norm`
  is a name in `NORMS`. `sequence_axis` divides time, as in `LanguageModel`.
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
    channel_hidden: int | None = None,
    norm: str = "layer",
    sequence_axis: str | None = None,
    dtype,
    param_dtype,
    rngs: nnx.Rngs,
  ):
    dtypes = {"dtype": dtype, "param_dtype": param_dtype}
    new_norm = lambda: NORMS[norm](dim, param_dtype=param_dtype, rngs=rngs)
    self.mixer_norm = new_norm()
    place: dict[str, Any] = {"layer": layer, "num_layers": num_layers}
    heads = {} if num_heads is None else {"num_heads": num_heads}
    taken = mixer_arguments(mixer)
    given = {name: value for name, value in (place | heads).items() if name in taken}
    self.mixer = MIXERS[mixer](dim, **given, **mixer_options, **dtypes, rngs=rngs)
    if (channel_mixer_class := CHANNEL_MIXERS[channel_mixer]) is None:
      self.channel_norm = self.channel_mixer = None
    else:
      self.channel_norm = new_norm()
      given = place if hasattr(channel_mixer_class, "init_state") else {}
      given = given | {"hidden": channel_hidden}
      self.channel_mixer = channel_mixer_class(dim, **given, **dtypes, rngs=rngs)
    if sequence_axis is not None:
      divide_time(self.mixer, sequence_axis)
      if hasattr(self.channel_mixer, "init_state"):
        divide_time(self.channel_mixer, sequence_axis)
    self.dtype = dtype

  def init_state(self, batch_size: int) -> BlockState:
    """The state before the first token. float32."""
    channel = getattr(self.channel_mixer, "init_state", lambda batch_size: None)
    return BlockState(self.mixer.init_state(batch_size), channel(batch_size))

  def __call__(
    self,
    x: jax.Array,
    state: BlockState | None = None,
    segment_ids: jax.Array | None = None,
  ) -> tuple[jax.Array, BlockState]:
    """Returns (x [B, T, D], the state after the last token)."""
    of_mixer, of_channel = state if state is not None else (None, None)
    with jax.named_scope("mixer"):
      y, of_mixer = self.mixer(self.mixer_norm(x).astype(self.dtype), of_mixer, segment_ids)
    x = x + y
    if self.channel_mixer is None or self.channel_norm is None:
      return x, BlockState(of_mixer, None)
    with jax.named_scope("channel_mixer"):
      y = self.channel_norm(x).astype(self.dtype)
      if hasattr(self.channel_mixer, "init_state"):
        y, of_channel = self.channel_mixer(y, of_channel, segment_ids)
      else:
        y = self.channel_mixer(y)
    return x + y, BlockState(of_mixer, of_channel)

"""One layer of a model: a time mixer, then a channel mixer, each after a norm."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers import MIXERS, Mixer, shard_time
from lnssm_jax.mixers.common.checks import check_choice, check_heads
from lnssm_jax.mixers.common.norms import NORMS
from lnssm_jax.mixers.common.routing import Aux
from lnssm_jax.models.channel_mixers import CHANNEL_MIXERS
from lnssm_jax.models.dropout import AFTER_CHANNEL_MIXER, AFTER_MIXER, LayerDropout
from lnssm_jax.ops.core.dropout import check_rate
from lnssm_jax.ops.core.states import register_state

# Arguments of a mixer that the model alone sets.
_SET_BY_MODEL = {"dim", "layer", "num_layers", "dtype", "param_dtype", "rngs"}


@register_state
class BlockState(NamedTuple):
  """Recurrent state of a block after the last token."""

  mixer: Any
  channel_mixer: Any  # None if it looks at one token at a time


def mixer_class(mixer: str | type[Mixer]) -> type[Mixer]:
  """Returns the class of a mixer that is given by its name in `MIXERS`, or as a class.

  Raises:
    ValueError: the name is unknown, or it is not a mixer; the message lists the names.
  """
  if isinstance(mixer, type):
    if issubclass(mixer, Mixer):
      return mixer
    raise ValueError(
      f"mixer={mixer.__name__} is not a subclass of lnssm_jax.mixers.Mixer; derive it from that "
      "class, or give a name in lnssm_jax.mixers.MIXERS."
    )
  note = " Register a mixer of your own first: lnssm_jax.mixers.register(name, Class)."
  return MIXERS[check_choice("mixer", mixer, MIXERS, note=note)]


def check_mixer(
  mixer: str | type[Mixer], options: Mapping[str, Any], dim: int, num_heads: int | None
) -> None:
  """Checks a mixer, its options and its number of heads before one is built.

  Raises:
    ValueError: the mixer or an option is unknown, or `num_heads` is missing or, without `head_dim`,
      does not divide `dim`; the message names it.
  """
  cls = mixer_class(mixer)
  parameters = inspect.signature(cls.__init__).parameters
  allowed = sorted(parameters.keys() - _SET_BY_MODEL - {"self"})
  for name in options:
    check_choice(f"mixer_options of {mixer_name(mixer)!r}: option", name, allowed)
  if "num_heads" in cls.set_by_model:
    num_heads = options.get("num_heads", num_heads)
    if num_heads is not None:
      if options.get("head_dim") is None:
        check_heads(dim, num_heads)
    elif parameters["num_heads"].default is inspect.Parameter.empty:
      raise ValueError(f"num_heads=None: mixer {mixer_name(mixer)!r} has heads; give their number.")


def check_channel_mixer(channel_mixer: str, hidden: int | None, options: Mapping[str, Any]) -> None:
  """Checks a channel mixer and its options before one is built.

  Raises:
    ValueError: the channel mixer or an option is unknown, or there is none to take them.
  """
  cls = CHANNEL_MIXERS[check_choice("channel_mixer", channel_mixer, CHANNEL_MIXERS)]
  parameters = {} if cls is None else inspect.signature(cls.__init__).parameters
  if hidden is not None and "hidden" not in parameters:
    raise ValueError(
      f"channel_hidden={hidden} is the number of hidden channels, and "
      f"channel_mixer={channel_mixer!r} has none; leave it out, or choose another channel mixer."
    )
  allowed = sorted(parameters.keys() - _SET_BY_MODEL - {"self", "hidden"})
  for name in options:
    check_choice(f"channel_mixer_options of {channel_mixer!r}: option", name, allowed)


def pattern_of(mixer: Any) -> tuple[str | type[Mixer], ...]:
  """The mixers of a pattern; one alone is a pattern, too. A layer itself raises `ValueError`."""
  if isinstance(mixer, Mixer):
    raise ValueError(
      f"mixer is a layer, of {type(mixer).__name__}, but a model makes its own; give the class or "
      "its name, and its options as mixer_options."
    )
  return (mixer,) if isinstance(mixer, str | type) else tuple(mixer)


def mixer_name(mixer: str | type[Mixer]) -> str:
  """Returns the name of a mixer, for messages and options: that given, or that of its class."""
  return mixer if isinstance(mixer, str) else mixer.__name__


def options_by_mixer(
  pattern: Sequence[str | type[Mixer]],
  options: Mapping[str, Any],
  dim: int,
  num_heads: int | None,
) -> dict[str | type[Mixer], dict[str, Any]]:
  """The options of each mixer of a pattern, checked."""
  if len(pattern) > 1:
    for name in options:
      check_choice("mixer_options: mixer", name, map(mixer_name, pattern))
  by_mixer = {}
  for mixer in dict.fromkeys(pattern):
    own = options if len(pattern) == 1 else options.get(mixer_name(mixer), {})
    if not isinstance(own, Mapping):
      raise ValueError(
        f"mixer_options[{mixer_name(mixer)!r}]={own!r} is no dictionary; give the options of that"
        " mixer by name, such as {'feature_map': 'relu'}."
      )
    by_mixer[mixer] = dict(own)
    check_mixer(mixer, by_mixer[mixer], dim, num_heads)
  return by_mixer


def make_mixer(
  mixer: str | type[Mixer],
  dim: int,
  *,
  num_heads: int | None,
  layer: int | jax.Array,
  num_layers: int,
  **options,
) -> Mixer:
  """Builds a mixer; it is given those of `num_heads`, `layer` and `num_layers` that it takes."""
  cls = mixer_class(mixer)
  place = {"num_heads": num_heads, "layer": layer, "num_layers": num_layers}
  taken = {name: place[name] for name in cls.set_by_model if place[name] is not None}
  build: Any = cls
  return build(dim, **taken, **options)


def redraw(module: nnx.Module, *, std: float, output_std: float, rngs: nnx.Rngs) -> None:
  """Draws the kernels of all linear layers in `module` again, normal with standard deviation `std`.

  Those of the last layers, `o_proj` and `down`, whose outputs the residual stream adds up, have
  `output_std`. Biases stay.
  """
  layers: Any = nnx.iter_modules(module)
  for path, layer in layers:
    if isinstance(layer, nnx.Linear):
      size = output_std if path[-1] in ("o_proj", "down") else std
      kernel = layer.kernel[...]
      drawn = size * jax.random.normal(rngs.params(), kernel.shape, jnp.float32)
      layer.kernel[...] = drawn.astype(kernel.dtype)


class Block(nnx.Module):
  """x + mixer(norm(x)), then x + channel_mixer(norm(x)): [B, T, D] -> [B, T, D] in `dtype`.

  `mixer` is a name in `MIXERS` or a class, `channel_mixer` a name in `CHANNEL_MIXERS`;
  `LanguageModel` checks them. With the channel mixer "none" the block ends after the mixer.
  `num_heads`, `layer` and `num_layers` go to mixers that take them; `num_heads=None` leaves a mixer
  its own default, and one in `mixer_options` goes first. `norm` is a name in `NORMS`, with
  `norm_eps`. With `matrix_std` kernels of the MLP, and of a mixer that starts as its model does,
  are normal numbers of this size (`redraw`). `residual_dropout` and `sequence_axis` are as in
  `LanguageModel`.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int | None,
    layer: int | jax.Array,
    num_layers: int,
    mixer: str | type[Mixer],
    mixer_options: Mapping[str, Any],
    channel_mixer: str,
    channel_hidden: int | None = None,
    channel_mixer_options: Mapping[str, Any] | None = None,
    norm: str = "layer",
    norm_eps: float = 1e-5,
    matrix_std: float | None = None,
    residual_dropout: float = 0.0,
    sequence_axis: str | None = None,
    dtype,
    param_dtype,
    rngs: nnx.Rngs,
  ):
    dtypes = {"dtype": dtype, "param_dtype": param_dtype}
    new_norm = lambda: NORMS[norm](dim, eps=norm_eps, param_dtype=param_dtype, rngs=rngs)
    self.mixer_norm = new_norm()
    place: dict[str, Any] = {"layer": layer, "num_layers": num_layers}
    own: dict[str, Any] = {"num_heads": num_heads} | dict(mixer_options)
    self.mixer = make_mixer(mixer, dim, **place, **own, **dtypes, rngs=rngs)
    if (channel_mixer_class := CHANNEL_MIXERS[channel_mixer]) is None:
      self.channel_norm = self.channel_mixer = None
    else:
      self.channel_norm = new_norm()
      given = place if issubclass(channel_mixer_class, Mixer) else {}
      given |= {} if channel_hidden is None else {"hidden": channel_hidden}
      given |= dict(channel_mixer_options or {})
      self.channel_mixer = channel_mixer_class(dim, **given, **dtypes, rngs=rngs)
    if matrix_std is not None:
      branches = 1 if self.channel_mixer is None else 2
      sizes = {"std": matrix_std, "output_std": matrix_std / math.sqrt(branches * num_layers)}
      if self.mixer.starts_as_model:
        own = sizes if self.mixer.output_starts_smaller else sizes | {"output_std": matrix_std}
        redraw(self.mixer, **own, rngs=rngs)
      if self.channel_mixer is not None and not isinstance(self.channel_mixer, Mixer):
        redraw(self.channel_mixer, **sizes, rngs=rngs)
    if sequence_axis is not None:
      shard_time(self.mixer, sequence_axis)
      if isinstance(self.channel_mixer, Mixer):
        shard_time(self.channel_mixer, sequence_axis)
    self.residual_dropout = check_rate("residual_dropout", residual_dropout)
    self.sequence_axis, self.dtype = sequence_axis, dtype

  def init_state(self, batch_size: int) -> BlockState:
    """The state before the first token. float32."""
    channel = self.channel_mixer
    state = channel.init_state(batch_size) if isinstance(channel, Mixer) else None
    return BlockState(self.mixer.init_state(batch_size), state)

  def __call__(
    self,
    x: jax.Array,
    state: BlockState | None = None,
    segment_ids: jax.Array | None = None,
    *,
    dropout: LayerDropout | None = None,
  ) -> tuple[jax.Array, BlockState]:
    """Returns (x [B, T, D], the state after the last token); `dropout` None drops nothing."""
    mix = lambda *args, **key: (*self.mixer(*args, **key), None)
    return self._run(mix, x, state, segment_ids, dropout)[:2]

  def with_aux(
    self,
    x: jax.Array,
    state: BlockState | None = None,
    segment_ids: jax.Array | None = None,
    *,
    dropout: LayerDropout | None = None,
  ) -> tuple[jax.Array, BlockState, Aux | None]:
    """The same call with the auxiliary output of the mixer, None if it has none."""
    return self._run(self.mixer.with_aux, x, state, segment_ids, dropout)

  def _run(self, mix, x, state, segment_ids, dropout):
    def dropped(y, place):
      rate, axis = self.residual_dropout, self.sequence_axis
      return y if dropout is None else dropout.branch(y, place, rate, axis)

    key = None if dropout is None else dropout.in_mixer()
    of_mixer, of_channel = state if state is not None else (None, None)
    with jax.named_scope("mixer"):
      y, x = self.mixer_norm.add(x, None, self.dtype)
      y, of_mixer, aux = mix(y, of_mixer, segment_ids, dropout_key=key)
      y = dropped(y, AFTER_MIXER)
    if self.channel_mixer is None or self.channel_norm is None:
      return x + y, BlockState(of_mixer, None), aux
    with jax.named_scope("channel_mixer"):
      y, x = self.channel_norm.add(x, y, self.dtype)
      if isinstance(self.channel_mixer, Mixer):
        y, of_channel = self.channel_mixer(y, of_channel, segment_ids)
      else:
        y = self.channel_mixer(y)
      y = dropped(y, AFTER_CHANNEL_MIXER)
    return x + y, BlockState(of_mixer, of_channel), aux

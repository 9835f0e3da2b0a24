"""One layer of a model: a time mixer, then a channel mixer, each after a norm."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Never

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers import Mixer, redraw, shard_time
from lnssm_jax.mixers.common import fp8
from lnssm_jax.mixers.common.norms import NORMS
from lnssm_jax.mixers.common.routing import Aux, joined
from lnssm_jax.models.bidirectional import SHARED, Bidirectional
from lnssm_jax.models.channel_mixers import CHANNEL_MIXERS, MixtureOfExperts
from lnssm_jax.models.config import BackboneConfig, ModelConfig
from lnssm_jax.models.dropout import AFTER_CHANNEL_MIXER, AFTER_MIXER, LayerDropout
from lnssm_jax.models.options import NONE, channel_options, limits_of_layers, mixer_class
from lnssm_jax.models.parallel import Parallel
from lnssm_jax.models.shared import AFTER_SHARED, AfterShared
from lnssm_jax.ops.core.states import register_state


@register_state
class BlockState(NamedTuple):
  """Recurrent state of a block after the last token."""

  mixer: Any
  channel_mixer: Any  # None if it looks at one token at a time


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
  place: dict[str, Any] = {"num_heads": num_heads, "layer": layer, "num_layers": num_layers}
  if cls in (Parallel, AfterShared):
    own: dict[str, Any] = {name: options[name] for name in ("dtype", "param_dtype", "rngs")}
    options["mixers"] = {
      name: make_mixer(name, dim, **(place | own | dict(given)))
      for name, given in options["mixers"].items()
    }
    if cls is Parallel:
      return Parallel(**{name: x for name, x in options.items() if name not in own})
  taken = {name: place[name] for name in cls.set_by_model if place[name] is not None}
  build: Any = cls
  return build(dim, **taken, **options)


class Block(nnx.Module):
  """x + mixer(norm(x)), then x + channel_mixer(norm(x)): [B, T, D] -> [B, T, D] in `dtype`.

  A mixer or channel mixer "none" leaves its branch out, with its norm; norm_place "after" is
  x + norm(mixer(x)), and so for the channel mixer. A setting `num_heads` in the mixer's
  options goes before that of the model. With `matrix_std` kernels of the MLP, and of a mixer that
  starts as its model does, are normal numbers of this size (`redraw`).

  Args:
    config: settings of the model; `mixer` and `mixer_options` are those given here.
    mixer: a name in `MIXERS` or a class, "parallel", "after_shared", which has a norm of its own,
      or "none".
    channel_mixer, norm_place: those of this layer; None takes the config's.
    shared: the number of the block of "after_shared".
    alike: the numbers of the layers of this place in the pattern, which are all made alike.
    layer: counted from 0.
    sequence_axis: as in `LanguageModel`.
  """

  def __init__(
    self,
    config: ModelConfig | BackboneConfig,
    *,
    mixer: str | type[Mixer],
    mixer_options: Mapping[str, Any],
    layer: int | jax.Array,
    channel_mixer: str | None = None,
    norm_place: str = "before",
    shared: int = 0,
    alike: Sequence[int] = (),
    matrix_std: float | None = None,
    sequence_axis: str | None = None,
    rngs: nnx.Rngs,
  ):
    dim, num_layers = config.dim, config.num_layers
    dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
    dtypes = {"dtype": dtype, "param_dtype": param_dtype}
    of_norm = {"eps": config.norm_eps, "param_dtype": param_dtype, "rngs": rngs}
    new_norm = lambda: NORMS[config.norm](dim, **of_norm)
    self.norm_after = norm_place == "after"
    place: dict[str, Any] = {"layer": layer, "num_layers": num_layers}
    own: dict[str, Any] = {"num_heads": config.num_heads} | dict(mixer_options)
    own |= {"block": shared} if mixer == AFTER_SHARED else {}
    new = lambda: make_mixer(mixer, dim, **place, **own, **dtypes, rngs=rngs)
    both = getattr(config, "direction", "causal") == "both"
    normed = self.norm_after or mixer != AFTER_SHARED
    self.mixer_norm = new_norm() if mixer != NONE and normed else None
    mixes: Any = None
    if mixer != NONE:
      mixes = Bidirectional(new, shared=SHARED) if both else new()
    self.mixer = mixes
    chosen: Any = config.channel_mixer if channel_mixer is None else channel_mixer
    if (channel_mixer_class := CHANNEL_MIXERS[chosen]) is None:
      self.channel_norm = self.channel_mixer = None
    else:
      self.channel_norm = new_norm()
      given = place if issubclass(channel_mixer_class, Mixer) else {}
      given |= limits_of_layers(channel_options(config)[chosen], alike, num_layers)
      self.channel_mixer = channel_mixer_class(dim, **given, **dtypes, rngs=rngs)
    if matrix_std is not None:
      branches = sum(branch is not None for branch in (mixes, self.channel_mixer))
      normal = nnx.initializers.normal
      usual, smaller = normal(matrix_std), normal(matrix_std / math.sqrt(branches * num_layers))
      if mixes is not None and mixes.starts_as_model:
        last = smaller if mixes.output_starts_smaller else usual
        redraw(self.mixer, usual, output_init=last, rngs=rngs)
      if self.channel_mixer is not None and not isinstance(self.channel_mixer, Mixer):
        redraw(self.channel_mixer, usual, output_init=smaller, rngs=rngs)
    if sequence_axis is not None:
      if mixes is not None:
        shard_time(mixes, sequence_axis)
      if isinstance(self.channel_mixer, Mixer):
        shard_time(self.channel_mixer, sequence_axis)
    if config.matmul == "fp8":
      fp8.use(self)
    self.residual_dropout = config.residual_dropout
    self.residual_scale = getattr(config, "residual_scale", 1.0)
    self.sequence_axis, self.dtype = sequence_axis, dtype

  def init_state(self, batch_size: int) -> BlockState:
    """The state before the first token. float32."""
    channel = self.channel_mixer
    init = lambda layer: layer.init_state(batch_size) if isinstance(layer, Mixer) else None
    return BlockState(init(self.mixer), init(channel))

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
    if isinstance(self.mixer, Bidirectional):
      both = self.mixer
      mix = lambda x, _, ids, **key: (both(x, segment_ids=ids, **key), None, None)
    return self._run(mix, x, state, segment_ids, dropout)[:2]

  def with_aux(
    self,
    x: jax.Array,
    state: BlockState | None = None,
    segment_ids: jax.Array | None = None,
    *,
    dropout: LayerDropout | None = None,
  ) -> tuple[jax.Array, BlockState, Aux | None]:
    """The same call with the auxiliary output of mixer and experts, None if there is none."""
    mix = None if self.mixer is None else self.mixer.with_aux
    return self._run(mix, x, state, segment_ids, dropout)

  def __getitem__(self, number: int) -> Never:
    raise TypeError("a block is no list, but a stack of equal layers; model.layer(0) is the first.")

  def of_mixer(self, x: jax.Array) -> jax.Array:
    """The input of the mixer, [B, T, D], of that of the block."""
    return self._input(self.mixer_norm, x, None)[0]

  def _input(self, norm, x, added):
    """(the input of a branch, x + added)."""
    if not self.norm_after and norm is not None:
      return norm.add(x, added, self.dtype)
    x = x if added is None else x + added
    return x, x

  def _run(self, mix, x, state, segment_ids, dropout):
    def branch(y, norm, place):
      rate, axis = self.residual_dropout, self.sequence_axis
      y = norm(y, dtype=self.dtype) if self.norm_after else y
      y = y if self.residual_scale == 1 else y * self.residual_scale
      return y if dropout is None else dropout.branch(y, place, rate, axis)

    key = None if dropout is None else dropout.in_mixer()
    of_mixer, of_channel = state if state is not None else (None, None)
    y, aux = None, None  # the output of a branch, which the next norm or the end adds to x
    if self.mixer is not None:
      with jax.named_scope("mixer"):
        y, x = self._input(self.mixer_norm, x, None)
        y, of_mixer, aux = mix(y, of_mixer, segment_ids, dropout_key=key)
        y = branch(y, self.mixer_norm, AFTER_MIXER)
    if self.channel_mixer is None:
      return x + y, BlockState(of_mixer, None), aux
    with jax.named_scope("channel_mixer"):
      y, x = self._input(self.channel_norm, x, y)
      if isinstance(self.channel_mixer, Mixer):
        y, of_channel = self.channel_mixer(y, of_channel, segment_ids)
      elif isinstance(self.channel_mixer, MixtureOfExperts):
        y, of_experts = self.channel_mixer.with_aux(y)
        aux = joined(aux, of_experts)
      else:
        y = self.channel_mixer(y)
      y = branch(y, self.channel_norm, AFTER_CHANNEL_MIXER)
    return x + y, BlockState(of_mixer, of_channel), aux

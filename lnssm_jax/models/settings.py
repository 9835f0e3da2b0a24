"""Language models of plain settings, as configs and exports store them."""

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from lnssm_jax.mixers import MIXERS
from lnssm_jax.models.channel_mixers import CHANNEL_MIXERS
from lnssm_jax.models.config import ModelConfig
from lnssm_jax.models.language_model import LanguageModel
from lnssm_jax.models.options import NONE, mixer_class, mixer_name, pattern_of

type Settings = ModelConfig | Mapping[str, Any]


def model_of(
  settings: Settings, key: jax.Array, *, sequence_axis: str | None = None
) -> LanguageModel:
  """Builds a `LanguageModel` with random parameters.

  Raises:
    ValueError, TypeError: the settings are none of a model.
  """
  config = settings if isinstance(settings, ModelConfig) else ModelConfig(**settings)
  return LanguageModel(config, sequence_axis=sequence_axis, rngs=nnx.Rngs(key))


def stored(config: ModelConfig) -> dict[str, Any]:
  """The settings of a model as JSON: dictionaries, lists, strings and numbers, mixers by name.

  Raises:
    ValueError: a mixer is a class without a name in `lnssm_jax.mixers.MIXERS`, or an option is no
      value of JSON.
  """
  names = {cls: name for name, cls in MIXERS.items()}
  values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
  pattern = pattern_of(config.mixer)
  for cls in pattern:
    if isinstance(cls, type) and cls not in names:
      raise ValueError(
        f"mixer={cls.__name__} is a class without a name, by which a file could mention it; give it"
        f" one first: lnssm_jax.mixers.register({cls.__name__.lower()!r}, {cls.__name__})."
      )
  named = {mixer_name(x): names[x] if isinstance(x, type) else x for x in pattern}
  listed = [named[mixer_name(x)] for x in pattern]
  values["mixer"] = listed[0] if isinstance(config.mixer, str | type) else listed
  if len(pattern) > 1:
    values["mixer_options"] = {named[x]: own for x, own in config.mixer_options.items()}
  return {name: _json(name, value) for name, value in values.items()}


def graph_of(settings: Settings, *, sequence_axis: str | None = None) -> Any:
  """Static part of the model for `nnx.merge(graph, params)`; computes no parameters."""
  return abstract_model(settings, sequence_axis=sequence_axis)[0]


def params_of(model: nnx.Module) -> dict[str, Any]:
  """Parameters of a model, as a nested dictionary of arrays."""
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def abstract_params(settings: Settings) -> dict[str, Any]:
  """Shapes and dtypes of the parameters of a model, as `params_of` arranges them."""
  return abstract_model(settings)[1]


def abstract_model(
  settings: Settings, *, sequence_axis: str | None = None
) -> tuple[Any, dict[str, Any]]:
  """(`graph_of`, `abstract_params`) of one trace of the model."""
  build = lambda: model_of(settings, jax.random.key(0), sequence_axis=sequence_axis)
  graph, params = nnx.split(jax.eval_shape(build), nnx.Param)
  return graph, nnx.to_pure_dict(params)


def count_parameters(tree) -> int:
  """Counts the numbers in a model, or in a tree of parameters or of their shapes."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Settings with every default written out, so that equal ones describe the same function.

  None that stands for a value, such as num_kv_heads=None, becomes that value. Options of mixers are
  then by place in the pattern: "0", "1", ..., with `num_heads` where they have heads; that of the
  model is the first's, or None.
  """
  values = _defaults(LanguageModel) | dict(settings)
  dim, heads = values["dim"], values["num_heads"]
  mixer, options = values["mixer"], dict(values["mixer_options"] or {})
  pattern = [mixer] if isinstance(mixer, str | type) else list(mixer)
  if values["embedding_scale"] is None:
    values["embedding_scale"] = 1.0
  if values["norm_eps"] is not None:
    values["norm_eps"] = float(values["norm_eps"])
  values["mixer"] = [mixer_name(x) for x in pattern]
  values["mixer_options"], values["num_heads"] = {}, None
  for place, name in enumerate(pattern):
    own = options if len(pattern) == 1 else options.get(mixer_name(name), {})
    own, H = _complete_mixer(name, own, dim, heads)
    values["num_heads"] = values["num_heads"] or H
    values["mixer_options"][str(place)] = own
  for column in ("channel_mixer", "norm_place"):
    if not isinstance(given := values[column], str):
      values[column] = list(given) if len(set(given)) > 1 else given[0]
  several = values["channel_mixer"]
  kinds = {several} if isinstance(several, str) else {*several} - {NONE}
  options, width = dict(values["channel_mixer_options"] or {}), values["channel_hidden"]
  if len(kinds) == 1:
    kind = min(kinds)
    options, values["channel_hidden"] = _complete_channel_mixer(
      kind, {"hidden": width} | options, dim
    )
  else:
    of_kind = lambda x: _complete_channel_mixer(x, {"hidden": width} | options.get(x, {}), dim)
    options = {x: own | {"hidden": hidden} for x in kinds for own, hidden in [of_kind(x)]}
    values["channel_hidden"] = None
  values["channel_mixer_options"] = options
  return values


def _complete_channel_mixer(
  name: str, own: Mapping[str, Any], dim: int
) -> tuple[dict[str, Any], int | None]:
  """(the options of a channel mixer with their defaults, its number of hidden channels)."""
  channel, own = CHANNEL_MIXERS[name], dict(own)
  hidden = own.pop("hidden", None)
  if channel is None:
    return own, hidden
  own = _defaults(channel) | own
  own = {n: v for n, v in own.items() if n not in ("hidden", "layer", "num_layers")}
  usual = getattr(channel, "usual_activation", None)
  own |= {"activation": usual} if usual and own["activation"] is None else {}
  width = getattr(channel, "usual_width", lambda dim: 4 * dim)
  return own, hidden or width(dim)


def _complete_mixer(
  name: str | type, own: Mapping[str, Any], dim: int, heads: int | None
) -> tuple[dict[str, Any], int | None]:
  """(the options of a mixer with their defaults and those of heads, its number of heads)."""
  if name == NONE:
    return {}, None
  cls = mixer_class(name)
  H = own.get("num_heads", heads) if "num_heads" in cls.set_by_model else None
  own = _defaults(cls) | {n: v for n, v in own.items() if n != "attention_dropout"}
  own.pop("attention_dropout", None)
  stand_for = {"num_kv_heads": H, "num_value_heads": H, "width": dim, "hidden": 4 * dim}
  stand_for |= {"gate_rank": -(-dim // 16)} if "state_dim" in own else {}
  stand_for |= {"head_dim": dim // H, "value_head_dim": dim // H} if H else {}
  own |= {n: v for n, v in stand_for.items() if n in own and own[n] is None}
  if own.get("qk_norm") is False or own.get("inner_norm") == "none":
    own.pop("norm_eps", None)  # of norms that there are not
  if "part_scales" in own:
    own["part_scales"] = list(own["part_scales"] or [1.0] * 5)
  if "mixers" in own:
    own["mixers"] = {n: _complete_mixer(n, x, dim, heads)[0] for n, x in own["mixers"].items()}
    for scales in own.keys() & {"input_scales", "output_scales"}:
      own[scales] = dict.fromkeys(own["mixers"], 1.0) | dict(own[scales] or {})
  own = {n: v for n, v in own.items() if n not in cls.set_by_model}
  return own | ({} if H is None else {"num_heads": H}), H


def _json(name: str, value: Any) -> Any:
  if isinstance(value, Mapping):
    return {key: _json(f"{name}[{key!r}]", x) for key, x in value.items()}
  if isinstance(value, list | tuple):
    return [_json(name, x) for x in value]
  value = value.item() if isinstance(value, np.generic) else value
  if value is not None and not isinstance(value, str | bool | int | float):
    raise ValueError(
      f"{name}={value!r:.80} is of type {type(value).__name__}, which a file of settings cannot "
      "hold; give a string, a number, or a list or dictionary of them."
    )
  return value


def _defaults(cls: type) -> dict[str, Any]:
  parameters = inspect.signature(cls.__init__).parameters.items()
  own = {n: p.default for n, p in parameters if p.default is not inspect.Parameter.empty}
  return {n: v for n, v in own.items() if n not in ("dtype", "param_dtype")}

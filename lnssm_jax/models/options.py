"""Checks of the settings of a model, also against what its mixers and channel mixer take."""

import collections.abc
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal

import jax.numpy as jnp

from lnssm_jax.mixers import MIXERS, Mixer
from lnssm_jax.mixers.common.checks import (
  check_choice,
  check_dtype,
  check_heads,
  check_norm_eps,
  check_positive,
  check_soft_cap,
)
from lnssm_jax.models.channel_mixers import CHANNEL_MIXERS
from lnssm_jax.models.parallel import Parallel
from lnssm_jax.models.shared import AFTER_SHARED, AfterShared
from lnssm_jax.ops.core.checks import check_names
from lnssm_jax.ops.core.dropout import check_rate

NONE = "none"  # a layer without a mixer, or without a channel mixer
NORM_PLACES = ("before", "after")

# Arguments of a mixer that the model alone sets.
_SET_BY_MODEL = {"dim", "block", "layer", "num_layers", "dtype", "param_dtype", "rngs"}
_OF_FLOAT = {
  "norm_eps": lambda name, value: check_norm_eps(value),
  **dict.fromkeys(("embedding_dropout", "residual_dropout", "drop_path"), check_rate),
}


def normal(config: Any) -> dict[str, Any]:
  """Settings of a config in one form: dtypes as names, no list as a pattern, options that are."""
  found: dict[str, Any] = {}
  for name in ("dtype", "param_dtype"):
    check_dtype(name, given := getattr(config, name))
    found[name] = jnp.dtype(given).name
  if not isinstance(config.mixer, str | type):
    found["mixer"] = pattern_of(config.mixer)
  for name in ("channel_mixer", "norm_place"):
    if isinstance(given := getattr(config, name, ""), list | tuple):
      found[name] = tuple(given) if len(set(given)) > 1 else given[0]
  for name in ("mixer_options", "channel_mixer_options"):
    if isinstance(options := getattr(config, name, {}), Mapping | None):
      found[name] = dict(options or {})
  if isinstance(getattr(config, "image_size", None), list):
    found["image_size"] = tuple(config.image_size)
  return {name: value for name, value in found.items() if hasattr(config, name)}


def check(config: Any) -> None:
  """Checks the settings of a config, one by one and against each other.

  Raises:
    ValueError: as `LayersConfig`.
  """
  for name, kind in hints_of(type(config)).items():
    _check_value(name, getattr(config, name), kind)
  if config.matmul == "fp8" and config.dtype == "float16":
    raise ValueError("matmul='fp8' sums beyond dtype='float16'; use dtype='bfloat16'.")
  pattern = pattern_of(config.mixer)
  if not 1 <= len(pattern) <= config.num_layers:
    raise ValueError(
      f"mixer={config.mixer!r} is a pattern of {len(pattern)} mixers; num_layers="
      f"{config.num_layers} needs one of 1 to {config.num_layers}."
    )
  options_by_mixer(pattern, config.mixer_options, config.dim, config.num_heads)
  if AFTER_SHARED in pattern and not hasattr(config, "vocab_size"):
    raise ValueError(f"mixer={config.mixer!r:.80}: {AFTER_SHARED!r} is for a LanguageModel only.")
  if not hasattr(config, "channel_mixer"):
    return
  _check_table(config, pattern)
  channel_options(config)
  if not hasattr(config, "vocab_size"):
    return
  check_soft_cap("logit_soft_cap", config.logit_soft_cap)
  if config.initialization == "lnssm" and not config.embedding_norm:
    raise ValueError(
      "initialization='lnssm' starts with an embedding of tiny numbers, and embedding_norm=False "
      "leaves them so: the model would start silent. Use 'gpt2', or embedding_norm=True."
    )


class Layer(typing.NamedTuple):
  """A layer of a model: a row of the table that its pattern is."""

  mixer: str | type[Mixer]
  channel_mixer: str
  norm_place: str


def table_of(config: Any) -> tuple[Layer, ...]:
  """The layers that a model's pattern repeats."""
  pattern = pattern_of(config.mixer)
  column = lambda given: (given,) * len(pattern) if isinstance(given, str) else given
  columns = column(config.channel_mixer), column(getattr(config, "norm_place", "before"))
  return tuple(Layer(*row) for row in zip(pattern, *columns, strict=True))


def channel_options(config: Any) -> dict[str, dict[str, Any]]:
  """The options of each channel mixer of a pattern, `hidden` among them, checked."""
  kinds = list(dict.fromkeys(x.channel_mixer for x in table_of(config) if x.channel_mixer != NONE))
  kinds = kinds or [NONE]
  width, options = config.channel_hidden, config.channel_mixer_options
  usual = {} if width is None else {"hidden": width}
  if len(kinds) == 1:
    check_channel_mixer(kinds[0], width, options)
    return {kinds[0]: usual | options}
  for kind, own in options.items():
    check_choice("channel_mixer_options: channel mixer", kind, kinds)
    if not isinstance(own, Mapping):
      raise ValueError(
        f"channel_mixer_options[{kind!r}]={own!r} is no dictionary; with channel mixers of several"
        " kinds give the options of each by name, such as {'swiglu': {'hidden': 64}}."
      )
  by_kind = {kind: usual | options.get(kind, {}) for kind in kinds}
  for kind, own in by_kind.items():
    check_channel_mixer(kind, None, own, also=("hidden",))
  return by_kind


def limits_of_layers(options: Mapping[str, Any], layers: Sequence[int], num_layers: int) -> Any:
  """`options` of a channel mixer in these layers: of a list, the limit that they have; 0 is None.

  Raises:
    ValueError: a list has another length, or the layers, of one place in a pattern, have several.
  """
  found = dict(options)
  for name in ("limit", "shared_limit"):
    if not isinstance(given := options.get(name), list | tuple):
      continue
    if len(given) != num_layers:
      raise ValueError(
        f"{name}={given!r:.80} has {len(given)} numbers, but num_layers={num_layers}."
      )
    of_layers = {given[layer] for layer in layers or range(num_layers)}
    if len(of_layers) > 1:
      raise ValueError(
        f"{name}={given!r:.80}: layers of one place in the pattern of mixers have"
        f" {' and '.join(map(str, sorted(of_layers)))}; give a longer pattern."
      )
    found[name] = of_layers.pop() or None
  return found


def _check_table(config: Any, pattern: Sequence[Any]) -> None:
  """Checks the columns of `table_of`."""
  for name, known in (("channel_mixer", CHANNEL_MIXERS), ("norm_place", NORM_PLACES)):
    given = getattr(config, name, "before")
    several = (given,) * len(pattern) if isinstance(given, str) else given
    for value in several:
      check_choice(name, value, known)
    if len(several) != len(pattern):
      raise ValueError(
        f"{name}={given!r} has {len(several)} layers and mixer={config.mixer!r} has {len(pattern)};"
        " give a pattern as long as that of mixer, or one name for all layers."
      )
  table = table_of(config)
  if any(row.mixer == NONE and row.channel_mixer == NONE for row in table):
    raise ValueError(
      f"mixer={config.mixer!r}, channel_mixer={config.channel_mixer!r}: a layer has neither a mixer"
      " nor a channel mixer; give it one."
    )


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
  """The types of the settings of a config."""
  return typing.get_type_hints(cls)


def _check_value(name: str, value: Any, kind: Any) -> None:
  kinds = {kind, *typing.get_args(kind)}
  if value is None and types.NoneType in kinds:
    return
  choices = [x for x in kinds if typing.get_origin(x) is Literal]
  if choices:
    check_choice(name, value, typing.get_args(choices[0]))
  elif int in kinds:
    for number in value if isinstance(value, tuple | list) else (value,):
      check_positive(name, number)
  elif name in _OF_FLOAT:
    _OF_FLOAT[name](name, value)
  elif name != "mixer" and not fits(value, kind):
    raise ValueError(f"{name}={value!r} is of type {type(value).__name__}; give {type_name(kind)}.")


def fits(value: Any, kind: Any) -> bool:
  """Whether a value is of an annotated type; numbers of NumPy and lists for tuples are."""
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if kind in (Any, inspect.Parameter.empty) or (kind is None and value is None):
    return True
  if origin in (typing.Union, types.UnionType):
    return any(fits(value, option) for option in args)
  if origin is Literal:
    return value in args
  if origin in (tuple, list, collections.abc.Sequence):
    inner = args[0] if args else Any
    return isinstance(value, tuple | list) and all(fits(item, inner) for item in value)
  if origin in (dict, collections.abc.Mapping) or kind is dict:
    return isinstance(value, Mapping)
  if origin is type:
    return isinstance(value, type)
  number = {int: Integral, float: Real}.get(kind)
  if number is not None:
    return isinstance(value, number) and not isinstance(value, bool)
  return not isinstance(kind, type) or isinstance(value, kind)


def type_name(kind: Any) -> str:
  """Readable name of an annotated type."""
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin in (typing.Union, types.UnionType):
    return " or ".join(map(type_name, args))
  if origin is Literal:
    return " or ".join(map(repr, args))
  return "None" if kind is types.NoneType else getattr(kind, "__name__", str(kind))


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
  if mixer in (of_several := {"parallel": Parallel, AFTER_SHARED: AfterShared}):
    return of_several[mixer]
  note = " Register a mixer of your own first: lnssm_jax.mixers.register(name, Class)."
  return MIXERS[check_choice("mixer", mixer, MIXERS, note=note)]


def check_mixer(
  mixer: str | type[Mixer], options: Mapping[str, Any], dim: int, num_heads: int | None
) -> None:
  """Checks a mixer, its options and its number of heads before one is built.

  Raises:
    ValueError: the mixer or an option is unknown, or of another type than the constructor says, or
      `num_heads` is missing or, without `head_dim`, does not divide `dim`; the message names it.
  """
  cls = mixer_class(mixer)
  parameters = inspect.signature(cls.__init__).parameters
  _check_options(f"mixer_options of {mixer_name(mixer)!r}", options, parameters, {"self"})
  if "num_heads" in cls.set_by_model:
    num_heads = options.get("num_heads", num_heads)
    if num_heads is not None:
      if options.get("head_dim") is None:
        check_heads(dim, num_heads)
    elif parameters["num_heads"].default is inspect.Parameter.empty:
      raise ValueError(f"num_heads=None: mixer {mixer_name(mixer)!r} has heads; give their number.")
  if cls in (Parallel, AfterShared):
    _check_parts(mixer_name(mixer), options, dim, num_heads, several=cls is Parallel)


def _check_parts(
  mixer: str, options: Mapping[str, Any], dim: int, num_heads: int | None, *, several: bool
) -> None:
  """Checks the mixers in a mixer and the names that have scales."""
  mixers = options.get("mixers", {})
  if (len(mixers) < 2 if several else len(mixers) != 1) or not set(mixers) <= set(MIXERS):
    wanted = ("two or more mixers", "{'mamba2': {}, 'softmax_attention': {}}")
    wanted = wanted if several else ("one mixer", "{'mamba2': {}}")
    raise ValueError(
      f"mixer_options of {mixer!r}: mixers={mixers!r:.80} must have the options of {wanted[0]} by"
      f" name, such as {wanted[1]}."
    )
  for name, own in mixers.items():
    if not isinstance(own, Mapping):
      raise ValueError(f"mixer_options of {mixer!r}: {name}={own!r:.80} is no dictionary.")
    check_mixer(name, own, dim, num_heads)
  for scales in ("input_scales", "output_scales"):
    for name in options.get(scales) or {}:
      check_choice(f"mixer_options of 'parallel': {scales}", name, mixers)


def check_channel_mixer(
  channel_mixer: str, hidden: int | None, options: Mapping[str, Any], *, also: Sequence[str] = ()
) -> None:
  """Checks a channel mixer and its options, and those of `also`, before one is built.

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
  own = {"self", "hidden"} - {*also}
  _check_options(f"channel_mixer_options of {channel_mixer!r}", options, parameters, own)


def _check_options(
  what: str,
  options: Mapping[str, Any],
  parameters: Mapping[str, inspect.Parameter],
  without: set[str],
) -> None:
  """Checks names and types of options against the arguments of a constructor."""
  allowed = sorted(parameters.keys() - _SET_BY_MODEL - without)
  check_names(what, options, allowed)
  for name, value in options.items():
    kind = parameters[check_choice(f"{what}: option", name, allowed)].annotation
    if not fits(value, kind):
      raise ValueError(
        f"{what}: {name}={value!r} is of type {type(value).__name__}; give {type_name(kind)}."
      )


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
      note = " A pattern has the options of each of its mixers by name: {'gla': {...}}."
      check_choice("mixer_options: mixer", name, map(mixer_name, pattern), note=note)
  by_mixer: dict[str | type[Mixer], dict[str, Any]] = {}
  for mixer in dict.fromkeys(pattern):
    if mixer == NONE:
      by_mixer[mixer] = {}
      continue
    own = options if len(pattern) == 1 else options.get(mixer_name(mixer), {})
    if not isinstance(own, Mapping):
      raise ValueError(
        f"mixer_options[{mixer_name(mixer)!r}]={own!r} is no dictionary; give the options of that"
        " mixer by name, such as {'feature_map': 'relu'}."
      )
    by_mixer[mixer] = dict(own)
    check_mixer(mixer, by_mixer[mixer], dim, num_heads)
  return by_mixer


def configured[Config](cls: type[Config]) -> Callable[[Callable[..., None]], Callable[..., None]]:
  """Decorates a model's `__init__(self, config, *, ...)`: settings are keyword arguments, too.

      LanguageModel(ModelConfig(dim=8, ...), rngs=rngs), LanguageModel(dim=8, ..., rngs=rngs)

  Its signature lists the settings of `cls`, for help and for Linen's faces.

  Raises:
    ValueError: a setting is unknown, or both a config and settings are given.
  """
  fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls))}

  def decorate(build):
    own = list(inspect.signature(build).parameters.values())
    name = build.__qualname__.partition(".")[0]

    @functools.wraps(build)
    def __init__(self, config: Config | None = None, /, **given: Any) -> None:
      more = {x.name: given.pop(x.name) for x in own[2:] if x.name in given}
      check_names(name, given, fields)
      for option in given:
        check_choice(f"{name}: option", option, fields)
      if config is not None and given:
        raise ValueError(
          f"{name}: a config is given, and {', '.join(given)} too; use dataclasses.replace(config,"
          " ...)."
        )
      build(self, cls(**given) if config is None else config, **more)

    listed = [_parameter(field, hints_of(cls)[name]) for name, field in fields.items()]
    __init__.__signature__ = inspect.Signature([own[0], *listed, *own[2:]])  # pyrefly: ignore
    return __init__

  return decorate


def _parameter(field: dataclasses.Field[Any], kind: Any) -> inspect.Parameter:
  """The argument that stands for a setting; dtypes are of any kind that JAX knows."""
  empty = inspect.Parameter.empty
  default = field.default
  if field.default_factory is not dataclasses.MISSING:  # of dictionaries
    default, kind = None, Mapping[str, Any] | None
  if field.name.endswith("dtype"):
    kind = empty
  default = empty if default is dataclasses.MISSING else default
  return inspect.Parameter(
    field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
  )

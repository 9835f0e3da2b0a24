"""Families of published models as tables, each used to load and to save.

A `Family` says in which setting of `LanguageModel` each setting of config.json is (`fields`), and
in which of our parameters each tensor is (`rows`). Nothing is computed from a parameter: a row
relates two views of the same numbers, so that what was loaded is saved with the same bytes.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from lnssm_jax.pretrained.manifest import ExportError

Config = dict[str, Any]


class View(NamedTuple):
  """Another view of an array, not a copy, and the shape of the array with a view's shape.

  With `ours` it is not our array that is equal to the view, but that view of ours.
  """

  of: Callable[[Any], Any]
  shape: Callable[[tuple[int, ...]], tuple[int, ...]]
  ours: Callable[[Any], Any] | None = None


SAME = View(lambda x: x, lambda s: s)
TRANSPOSED = View(lambda x: x.T, lambda s: s[::-1])  # [out, in] -> [in, out]
CONVOLUTION = View(lambda x: x[:, 0].T, lambda s: (s[1], 1, s[0]))  # [D, 1, W] -> [W, D]
TWO_AXES = View(lambda x: x[0, 0], lambda s: (1, 1, *s))  # [1, 1, D] -> [D]


def by_heads(mixer: str) -> Callable[[Mapping[str, Any]], View]:
  """[H, N] -> [H N], N per head of the mixer, whose number may be an option of it in a pattern."""

  def view(settings):
    own = settings["mixer_options"].get(mixer)
    H = (own if isinstance(own, dict) else {}).get("num_heads", settings["num_heads"])
    return View(lambda x: x.reshape(-1), lambda s: (H, s[0] // H))

  return view


class Row(NamedTuple):
  """Where one of our parameters, or a part of it, is in a published file.

  `{}` in `theirs` is the number of a layer. A parameter of a layer whose tensor has no `{}` is a
  row of it: that tensor has a leading axis of layers.
  """

  theirs: str
  view: View | Callable[[Mapping[str, Any]], View] = SAME  # of their tensor; or by our settings
  part: Callable[[Any], Any] | None = None  # the view of ours that it is; None: all of it


type Rows = dict[str, Row | list[Row]]


def linear(ours: str, theirs: str) -> Rows:
  """A linear layer, with its bias where it has one."""
  return {f"{ours}.kernel": Row(f"{theirs}.weight", TRANSPOSED), f"{ours}.bias": _bias(theirs)}


def convolution(ours: str, theirs: str) -> Rows:
  """A convolution per channel, with its bias where it has one."""
  return {f"{ours}.kernel": Row(f"{theirs}.weight", CONVOLUTION), f"{ours}.bias": _bias(theirs)}


def norm(ours: str, theirs: str) -> Rows:
  """A norm, with its bias where it has one."""
  return {f"{ours}.scale": Row(f"{theirs}.weight"), f"{ours}.bias": _bias(theirs)}


def linears(ours: str, theirs: str, **names: str) -> Rows:
  """Linear layers ours=theirs below two modules."""
  return joined(linear(f"{ours}.{mine}", f"{theirs}.{name}") for mine, name in names.items())


def joined(rows: Iterable[Rows]) -> Rows:
  """The rows of all."""
  return {name: row for some in rows for name, row in some.items()}


def _bias(theirs: str) -> Row:
  return Row(f"{theirs}.bias")


REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Field:
  """A setting that is ours at the path `ours`, such as "mixer_options.window", or at several."""

  ours: str | tuple[str, ...]
  kinds: tuple[type, ...]
  default: Any = REQUIRED  # where config.json does not have it
  names: Mapping[Any, Any] | None = None  # {their value: ours}
  factor: float = 1  # ours = factor * theirs

  @property
  def paths(self) -> tuple[str, ...]:
    """All places of ours."""
    return (self.ours,) if isinstance(self.ours, str) else self.ours

  def read(self, name: str, value: Any) -> Any:
    """Our value for theirs of the setting `name`; ExportError if there is none."""
    if self.names is not None:
      if isinstance(value, list | dict) or value not in self.names:
        raise ExportError(
          f"{name}={value!r} is not implemented; only {', '.join(map(repr, self.names))}."
        )
      return self.names[value]
    if type(value) not in self.kinds and not (type(value) is int and float in self.kinds):
      kinds = " or ".join(kind.__name__ for kind in self.kinds)
      raise ExportError(f"{name}={value!r} must be {kinds}.")
    lowest = -(2**48) if float in self.kinds else 1
    if type(value) in (int, float) and not lowest <= value < 2**48:
      raise ExportError(f"{name}={value!r} must be at least {lowest} and below 2^48.")
    return value if value is None or self.factor == 1 else value * self.factor

  def write(self, value: Any) -> Any:
    """Their value for ours; None if there is none."""
    if self.names is not None:
      return next((theirs for theirs, ours in self.names.items() if ours == value), None)
    return value if value is None or self.factor == 1 else value / self.factor


@dataclasses.dataclass(frozen=True)
class Fixed:
  """A setting that must have one of these values; the first is written."""

  values: tuple[Any, ...]

  def __init__(self, *values: Any):
    object.__setattr__(self, "values", values)


class Free(NamedTuple):
  """A setting that does not change the function of a trained model, such as initializer_range."""


size = lambda ours, default=REQUIRED: Field(ours, (int,), default)
size_or_none = lambda ours: Field(ours, (int, type(None)), None)
number = lambda ours, default=REQUIRED, factor=1.0: Field(ours, (float,), default, None, factor)
number_or_none = lambda ours: Field(ours, (float, type(None)), None)
flag = lambda ours, default=REQUIRED: Field(ours, (bool,), default)
choice = lambda ours, names, default=REQUIRED: Field(ours, (), default, names)
free = lambda *names: dict.fromkeys(names, Free())

# Settings of every config.json that say nothing about the function.
_COMMON = free(
  "architectures",
  "auto_map",
  "bos_token_id",
  "dtype",
  "eos_token_id",
  "initializer_range",
  "max_length",
  "model_type",
  "name_or_path",
  "_name_or_path",
  "output_attentions",
  "output_hidden_states",
  "pad_token_id",
  "return_dict",
  "torch_dtype",
  "transformers_version",
  "unk_token_id",
  "use_cache",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
  """A family of published models.

  Attributes:
    name: its `model_type`.
    layout: "hf", "fla" or "mamba_ssm": the package that opens its folders.
    architecture: its class there.
    fields: {their setting: how it is ours}.
    constants: settings of ours that all its models have.
    rows: {our parameter: where it is}. Of a pattern of mixers, "blocks.rg_lru.o_proj.kernel" is
      that of one of them.
    normal: config.json with every setting that follows from others in its own field; it also
      checks what one field cannot.
    written: the inverse of `normal`, where it has one: for theirs, what `normal` is given.
    skipped: regular expression of tensors that follow from the config.
  """

  name: str
  layout: str
  architecture: str
  fields: Mapping[str, Field | Fixed | Free]
  constants: Mapping[str, Any]
  rows: Rows
  normal: Callable[[Config], Config] = dict
  written: Callable[[Config], Config] = dict
  skipped: str = r"(?!)"

  def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `LanguageModel`, without dtypes, of a config.json.

    Raises:
      ExportError: a setting is unknown, missing, of another kind, or not implemented.
    """
    config = self.normal(dict(config))
    fields = {**_COMMON, **self.fields}
    for name in config:
      if name not in fields:
        raise ExportError(
          f"{name}={config[name]!r:.80} is not a known setting of {self.name!r}; it may change "
          "what the model computes. Remove it from config.json only if you know that it does not."
        )
    settings: dict[str, Any] = {"mixer_options": {}, "channel_mixer_options": {}}
    for path, value in self.constants.items():
      _set(settings, path, value)
    for name, field in fields.items():
      if isinstance(field, Fixed):
        value = config.get(name, field.values[0])
        if not any(value == x and type(value) is type(x) for x in field.values):
          raise ExportError(
            f"{name}={value!r:.80} is not implemented; only {', '.join(map(repr, field.values))}."
          )
      elif isinstance(field, Field):
        value = config.get(name, field.default)
        if value is REQUIRED:
          raise ExportError(f"{name} is missing.")
        for path in field.paths:
          _set(settings, path, field.read(name, value))
    return settings

  def config(self, settings: Mapping[str, Any]) -> Config:
    """The config.json of a model with these settings; `settings` of it are equal to them.

    A model that the family cannot represent gives a config of another.
    """
    config: Config = {"architectures": [self.architecture], "model_type": self.name}
    for name, field in self.fields.items():
      if isinstance(field, Fixed):
        config[name] = field.values[0]
      elif isinstance(field, Field):
        config[name] = field.write(_get(settings, field.paths[0], field.default))
    return self.written(config)


def _set(settings: dict[str, Any], path: str, value: Any) -> None:
  *parents, name = path.split(".")
  for parent in parents:
    settings = settings.setdefault(parent, {})
  settings[name] = value


def _get(settings: Mapping[str, Any], path: str, default: Any) -> Any:
  value: Any = settings
  for name in path.split("."):
    if not isinstance(value, Mapping) or name not in value:
      return None if default is REQUIRED else default
    value = value[name]
  return value

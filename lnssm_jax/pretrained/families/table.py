"""Families of published models as tables, each used to load and to save.

A `Family` says in which setting of `LanguageModel` each setting of config.json is (`fields`), and
in which of our parameters each tensor is (`rows`). Nothing is computed from a parameter: a row
relates two views of the same numbers, so that what was loaded is saved with the same bytes.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from lnssm_jax.pretrained.families.common import COMMON
from lnssm_jax.pretrained.families.fields import REQUIRED, Config, Field, Fixed, Free, Same, agree
from lnssm_jax.pretrained.manifest import ExportError

QUANTIZED = ("quantization", "quantization_config", "compression_config")


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

  `{}` in `theirs` is the number of a layer, or of a block that layers share, and a second one that
  of an expert. A parameter of a layer
  whose tensor has no `{}` is a row of it: that tensor has a leading axis of layers.
  """

  theirs: str
  view: View | Callable[[Mapping[str, Any]], View] = SAME  # of their tensor; or by our settings
  part: Callable[[Any], Any] | None = None  # the view of ours that it is; None: all of it
  since: int = 0  # the first layer that has it; of earlier ones ours is 0, and changes nothing


type Rows = dict[str, Row | list[Row]]

# {a layer here: there}, in most families.
QKVO = {f"{x}_proj": f"{x}_proj" for x in "qkvo"}
GATED_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


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


def experts(theirs: str, **names: str) -> Rows:
  """Layers ours=theirs of the experts of a module, each with tensors of its own."""
  return {
    f"blocks.channel_mixer.experts.{mine}.kernel": Row(
      f"{theirs}.experts.{{}}.{name}.weight", TRANSPOSED
    )
    for mine, name in names.items()
  }


def joined(rows: Iterable[Rows]) -> Rows:
  """The rows of all."""
  return {name: row for some in rows for name, row in some.items()}


def _bias(theirs: str) -> Row:
  return Row(f"{theirs}.bias")


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
  """A family of published models.

  Attributes:
    name: its `model_type`.
    layout: "hf", "fla" or "mamba_ssm": the package that opens its folders.
    architecture: its class there.
    fields: {their setting: how it is ours}; settings of every family are in `common.COMMON`.
    renamed: {name of a setting in older files: today's}.
    constants: settings of ours that all its models have.
    rows: {our parameter: where it is}. Of a pattern of mixers, "blocks.rg_lru.o_proj.kernel" is
      that of one of them, and "blocks.rg_lru.mixer_norm.scale" a norm of the layers that have it.
    normal: config.json with every setting that follows from others in its own field; it also
      checks what one field cannot.
    written: the inverse of `normal`, where it has one: for theirs, what `normal` is given.
    skipped: regular expression of tensors that follow from the config or are left out; FURTHER in
      it stands for the numbers of layers after the last.
    older_tensors: {part of a tensor's name in older files: today's}.
    other_rows: rows that files may have in place of those of `rows`; they are only read.
    tensor: the name of a tensor in files with these settings, where it is not the row's.
    has: whether a config.json of this `model_type` is of this table, where there are several.
    longest: the most tokens of a sequence for which a config.json says what is implemented; None
      where that does not depend on it.
  """

  name: str
  layout: str
  architecture: str
  fields: Mapping[str, Field | Fixed | Same | Free]
  constants: Mapping[str, Any]
  rows: Rows
  normal: Callable[[Config], Config] = dict
  written: Callable[[Config], Config] = dict
  skipped: str = r"(?!)"
  renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
  older_tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
  other_rows: Rows = dataclasses.field(default_factory=dict)
  tensor: Callable[[Mapping[str, Any], str], str] = lambda settings, name: name
  has: Callable[[Mapping[str, Any]], bool] = lambda config: True
  longest: Callable[[Config], int | None] = lambda config: None

  def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `LanguageModel`, without dtypes, of a config.json.

    Raises:
      ExportError: a setting is unknown, missing, of another kind, or not implemented.
    """
    config = self.normal(self._with_current_names(config))
    fields = {**COMMON, **self.fields}
    for name, value in config.items():
      if name not in fields and value is not None:
        raise ExportError(
          f"{name}={value!r:.80} is not a known setting of {self.name!r}; it may change "
          "what the model computes. Remove it from config.json only if you know that it does not."
          if name not in QUANTIZED
          else f"{name}={value!r:.80}: quantized models are not implemented; load the folder in"
          " bfloat16 that this one was made of."
        )
    settings: dict[str, Any] = {"mixer_options": {}, "channel_mixer_options": {}}
    for path, value in self.constants.items():
      _set(settings, path, value)
    for name, field in fields.items():
      if isinstance(field, Fixed):
        value = config.get(name, field.values[0])
        if value is None and not field.written:  # of no part in today's class
          continue
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
      elif isinstance(field, Same) and config.get(name) is not None:
        agree(dict(config), name, field.of(config), field.said)
    return settings

  def as_stored(self, names: Collection[str]) -> "Family":
    """The family with the rows by which files with tensors of these names are read."""
    there = lambda row: not isinstance(row, list) and row.theirs.replace("{}", "0") in names
    others = {name: row for name, row in self.other_rows.items() if there(row)}
    return dataclasses.replace(self, rows=self.rows | others) if others else self

  def _with_current_names(self, config: Mapping[str, Any]) -> Config:
    """`config` with today's names; two names of one setting must have one value."""
    config = dict(config)
    for old, new in self.renamed.items():
      value = config.get(new)
      if old in config and value is not None:
        agree(config, old, value, f"{new}, today's name of it,")
      elif old in config:
        config[new] = config.pop(old)
    return config

  def config(self, settings: Mapping[str, Any]) -> Config:
    """The config.json of a model with these settings; `settings` of it are equal to them.

    A model that the family cannot represent gives a config of another.
    """
    config: Config = {"architectures": [self.architecture], "model_type": self.name}
    for name, field in self.fields.items():
      if isinstance(field, Fixed) and field.written:
        config[name] = field.values[0]
      elif isinstance(field, Field):
        config[name] = field.write(get(settings, field.paths[0], field.default))
    return self.written(config)


def _set(settings: dict[str, Any], path: str, value: Any) -> None:
  *parents, name = path.split(".")
  for parent in parents:
    settings = settings.setdefault(parent, {})
  settings[name] = value


def get(settings: Mapping[str, Any], path: str, default: Any) -> Any:
  """The setting at a path, such as "mixer_options.norm_eps"."""
  value: Any = settings
  for name in path.split("."):
    if not isinstance(value, Mapping) or name not in value:
      return None if default is REQUIRED else default
    value = value[name]
  return value

"""Overrides of settings from the command line: `--set optimizer.peak_lr=1e-3`."""

import ast
import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from lnssm_jax.files.checked_json import MAX_DEPTH
from train.config.checked import ConfigError, check, coerce, hint_of, hints_of, type_name, unknown
from train.config.loading import to_dict

_WORDS = {"none": None, "null": None, "true": True, "false": False}


def apply_overrides[T](config: T, assignments: Sequence[str]) -> T:
  """Applies every `a.b=value` of `assignments` to `config`; the last one for a setting wins.

  Rules between settings are checked once, at the end, so that settings that must change together
  can. Values are parsed by the type of the setting: text needs no quotes, None is `none`, a tuple
  of names `a,b`. Dictionary entries are set by key, as in `model.mixer_options.shift=kvg`, of a
  pattern `model.mixer_options.gla.shift=kvg`. Sets that `data.train` and `data.validation` no
  longer name lose their sources, fields and targets.

  Raises:
    ConfigError: unknown setting (with the closest known name), wrong type, or a broken rule.
  """
  values, given = to_dict(config), []
  for assignment in assignments:
    path, separator, text = assignment.partition("=")
    path = path.strip()
    check(
      separator == "=" and path != "",
      f"--set wants name=value, got {assignment!r}; for example --set optimizer.peak_lr=1e-3.",
    )
    _assign(values, type(config), path, text.strip())
    given.append(path)
  if "data.train" in given or "data.validation" in given:
    _drop_sets_left_out(values["data"], given)
  return type(config)(**values)


def _drop_sets_left_out(data: dict[str, Any], given: Sequence[str]) -> None:
  """Removes what belongs to sets that are no longer named, but what `given` paths assigned."""
  named = {*data["train"], *data.get("validation", ())}
  for group in ("sources", "fields", "targets"):
    if group in data and f"data.{group}" not in given:
      keep = lambda name, group=group: name in named or f"data.{group}.{name}" in given
      data[group] = {name: value for name, value in data[group].items() if keep(name)}


def _assign(values: dict[str, Any], hint: Any, path: str, text: str) -> None:
  """Sets the leaf at the dotted `path` of the nested dictionary `values`."""
  keys = path.split(".")
  check(
    len(keys) <= MAX_DEPTH,
    f"--set {path[:80]}... has {len(keys):,} parts; {MAX_DEPTH} are the most.",
  )
  for depth, key in enumerate(keys):
    if dataclasses.is_dataclass(hint):
      cls = typing.cast(type, hint)
      if key not in hints_of(cls):
        raise unknown(cls, key)
      hint = hint_of(cls, key)
    elif typing.get_origin(hint) is dict or (hint is Any and isinstance(values, dict)):
      check(key != "", f"{path!r} ends in a dot; name the entry to set.")
      hint = Any if hint is Any else typing.get_args(hint)[1]
    else:
      raise ConfigError(
        f"no setting {path!r}: {'.'.join(keys[:depth])} is a single value, {type_name(hint)}."
      )
    if depth == len(keys) - 1:
      values[key] = parse(text, hint, path)
    else:
      values = values.setdefault(key, {})


def parse(text: str, hint: Any, label: str) -> Any:
  """Parses `text` as a value of type `hint`."""
  if dataclasses.is_dataclass(hint):
    first = dataclasses.fields(typing.cast(Any, hint))[0].name
    raise ConfigError(f"{label} is a group of settings; set one of them: {label}.{first}=...")
  literal = _literal(text)
  options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
  if literal is None and types.NoneType in options:
    return None
  if hint is Any:
    return literal
  # A string setting takes the text as it is, so that a prompt may be "12" or "None"; only quotes
  # around it are removed.
  has_tuple = any(typing.get_origin(option) is tuple for option in options)
  wants_text = str in options or typing.get_origin(hint) is Literal
  if wants_text and not isinstance(literal, (str, tuple, list) if has_tuple else str):
    literal = text
  # Without a comma, names where one name may be text are text.
  is_tuple = has_tuple and ("," in text or str not in options)
  if is_tuple and isinstance(literal, str):
    literal = tuple(item.strip() for item in literal.split(",") if item.strip())
  try:
    return coerce(literal, hint, label)
  except ConfigError as error:
    whole = hint is int and isinstance(literal, float) and literal.is_integer()
    hint = f" Write {int(literal)}." if whole else ""
    if isinstance(literal, tuple) and not has_tuple:
      hint = " A run has one value; `lnssm-train sweep` trains one run per value."
    raise ConfigError(f"{error}{hint}") from None


def _literal(text: str) -> Any:
  """Parses a Python literal or one of `_WORDS`; anything else stays text."""
  if text.lower() in _WORDS:
    return _WORDS[text.lower()]
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    return text

"""Changes of single settings from the command line: `--set optimizer.peak_lr=1e-3`."""

import ast
import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from train.config import Train, from_dict, to_dict
from train.settings import ConfigError, check, coerce, hint_of, type_name, unknown

_WORDS = {"none": None, "null": None, "true": True, "false": False}


def apply(config: Train, assignments: Sequence[str]) -> Train:
  """`config` with every `a.b=value` of `assignments` done, the last one of a setting winning.

  The rules between settings are checked once, at the end, so that two settings that must change
  together can. Values are read by the type of the setting: text needs no quotes, None is written
  `none`, a tuple of names `a,b`. An entry of a dictionary is set by its key, as in
  `model.mixer_options.shift=kvg`.

  Raises:
    ConfigError: an unknown setting (with the nearest known one), a value of the wrong type, or a
      broken rule.
  """
  values = to_dict(config)
  for assignment in assignments:
    path, separator, text = assignment.partition("=")
    path = path.strip()
    check(
      separator == "=" and path != "",
      f"--set wants name=value, got {assignment!r}; for example --set optimizer.peak_lr=1e-3.",
    )
    _assign(values, Train, path, text.strip())
  return from_dict(values)


def _assign(values: dict[str, Any], hint: Any, path: str, text: str) -> None:
  """Sets the leaf at the dotted `path` of the nested dictionary `values`."""
  keys = path.split(".")
  for depth, key in enumerate(keys):
    if dataclasses.is_dataclass(hint):
      cls = typing.cast(type, hint)
      if key not in typing.get_type_hints(cls):
        raise unknown(cls, key)
      hint = hint_of(cls, key)
    elif typing.get_origin(hint) is dict:
      check(key != "", f"{path!r} ends in a dot; name the entry to set.")
      hint = typing.get_args(hint)[1]
    else:
      raise ConfigError(
        f"no setting {path!r}: {'.'.join(keys[:depth])} is a single value, {type_name(hint)}."
      )
    if depth == len(keys) - 1:
      values[key] = parse(text, hint, path)
    else:
      values = values.setdefault(key, {})


def parse(text: str, hint: Any, label: str) -> Any:
  """The value that `text` stands for, as the type `hint`."""
  if dataclasses.is_dataclass(hint):
    first = dataclasses.fields(typing.cast(Any, hint))[0].name
    raise ConfigError(f"{label} is a group of settings; set one of them: {label}.{first}=...")
  literal = _literal(text)
  options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
  if literal is None and types.NoneType in options:
    return None
  if hint is Any:
    return literal
  # Text stays text where text is wanted, so that a prompt may be "12" or "None"; only quotes
  # around it are taken off.
  wants_text = str in options or typing.get_origin(hint) is Literal
  if wants_text and not isinstance(literal, str):
    literal = text
  if typing.get_origin(hint) is tuple and isinstance(literal, str):
    literal = tuple(item.strip() for item in literal.split(",") if item.strip())
  try:
    return coerce(literal, hint, label)
  except ConfigError as error:
    whole = hint is int and isinstance(literal, float) and literal.is_integer()
    raise ConfigError(f"{error} Write {int(literal)}." if whole else str(error)) from None


def _literal(text: str) -> Any:
  """`text` read as a Python literal, or as one of the lower-case words, or left as it is."""
  if text.lower() in _WORDS:
    return _WORDS[text.lower()]
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    return text

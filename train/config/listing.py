"""All settings with type, default and meaning, as `--help` prints and `init` writes them."""

import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from typing import NamedTuple

from train.config.checked import hint_of, type_name


def listing(cls: type) -> str:
  """The settings of `cls` and its groups: name, type, default, meaning."""
  lines = ["settings (--set NAME=VALUE):"]
  for group, entries in groups(cls):
    about = inspect.cleandoc(group.__doc__ or "")
    lines += ["", textwrap.indent(about, "  "), ""]
    for entry in entries:
      default = "required" if entry.default is None else entry.default
      lines.append(f"  {entry.name}  ({entry.kind}; {default})")
      lines += textwrap.wrap(entry.meaning, 94, initial_indent=" " * 6, subsequent_indent=" " * 6)
  return "\n".join(lines)


class Entry(NamedTuple):
  """One setting, as text."""

  name: str  # "model.dim"
  kind: str
  default: str | None  # None: required
  meaning: str


def groups(cls: type) -> Iterator[tuple[type, list[Entry]]]:
  """Every group of settings of `cls` with its entries; those of `cls` itself come last."""
  own, meanings = [], _comments(cls)
  for field in dataclasses.fields(cls):
    hint = hint_of(cls, field.name)
    if dataclasses.is_dataclass(hint):
      for group, entries in groups(typing.cast(type, hint)):
        yield group, [entry._replace(name=f"{field.name}.{entry.name}") for entry in entries]
      continue
    default = None
    if field.default is not dataclasses.MISSING:
      default = repr(field.default)
    elif field.default_factory is not dataclasses.MISSING:
      default = repr(field.default_factory())
    own.append(Entry(field.name, type_name(hint), default, meanings[field.name]))
  yield cls, own


def _comments(cls: type) -> dict[str, str]:
  """The comment of each setting: at the end of its lines, else the one above it."""
  names = {field.name for field in dataclasses.fields(cls)}
  found = dict.fromkeys(names, "")
  for owner in reversed(cls.__mro__):
    if dataclasses.is_dataclass(owner):
      found |= _comments_in(inspect.getsource(owner), names)
  return found


def _comments_in(source: str, names: set[str]) -> dict[str, str]:
  found, above, current = {}, "", None
  for line in source.splitlines():
    code, mark, comment = line.partition("# ")
    text = comment.strip() if mark else ""
    name = code.partition(":")[0].strip()
    if line.startswith("  ") and not line.startswith("   ") and name in names:
      current, found[name], above = name, above, ""
    if code.strip() == "" and mark:
      above = f"{above} {text}".strip()
    elif current is not None and text:
      found[current] = text
    if code.strip().startswith("def "):
      break
  return found

"""The tables of docs/pretrained.md that say what becomes of each setting, by the families."""

from collections.abc import Iterable, Mapping
from typing import Any

from lnssm_jax.pretrained.families import FAMILIES, common
from lnssm_jax.pretrained.families.fields import Fixed, Free, Same

# A family reads them before its table, in which they have the values that are written.
_READ_BEFORE = ("attn", "hidden_ratio")


def rows() -> list[str]:
  """The lines of both tables, a blank one between them."""
  families: dict[str, Mapping[str, Any]] = {"all": common.COMMON}
  dense = {x.name for x in FAMILIES if x.constants.get("channel_mixer") != "moe"}
  for family in FAMILIES:  # the table of a hybrid of fla is that of its family, and `attn`
    other = family.name in dense and family.constants.get("channel_mixer") == "moe"
    families.setdefault(family.name + " with experts" * other, family.fields)
  return [*_merged(families, _free), "", *_merged(families, _must)]


def _merged(families: Mapping[str, Mapping[str, Any]], cells) -> Iterable[str]:
  """A row for each text, with all families that it is of."""
  names: dict[str, list[str]] = {}
  for name, fields in families.items():
    for text in cells(fields):
      names.setdefault(text, []).append(name if name == "all" else f"`{name}`")
  yield from (f"| {', '.join(those)} | {text} |" for text, those in names.items())


def _free(fields: Mapping[str, Any]) -> Iterable[str]:
  """Settings that cannot change the function, by reason."""
  reasons: dict[str, list[str]] = {}
  for setting, field in fields.items():
    if isinstance(field, Free):
      reasons.setdefault(field.reason, []).append(f"`{setting}`")
  for reason, settings in reasons.items():
    yield f"{', '.join(sorted(settings))} | {reason}"


def _must(fields: Mapping[str, Any]) -> Iterable[str]:
  """Settings that must have one value, or repeat others."""
  for setting, field in sorted(fields.items()):
    if isinstance(field, Fixed) and setting not in _READ_BEFORE:
      yield f"`{setting}` | {' or '.join(f'`{value!r}`' for value in field.values)}"
    elif isinstance(field, Same):
      yield f"`{setting}` | {field.said.rstrip(',')}"

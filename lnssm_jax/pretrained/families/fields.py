"""Kinds of settings of a config.json.

A setting is read (`Field`), must have one value (`Fixed`), repeats others and must agree with them
(`Same`), or cannot change the function, for a reason that is given (`Free`). Every other one is an
error, unless it is null.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.pretrained.manifest import ExportError

Config = dict[str, Any]

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
          f"{name}={value!r:.80} is not implemented; only {', '.join(map(repr, self.names))}."
        )
      return self.names[value]
    if type(value) not in self.kinds and not (type(value) is int and float in self.kinds):
      kinds = " or ".join(kind.__name__ for kind in self.kinds)
      raise ExportError(f"{name}={value!r:.80} must be {kinds}.")
    lowest = -(2**48) if float in self.kinds else 1
    if is_number(value) and not lowest <= value < 2**48:
      raise ExportError(f"{name}={value!r:.80} must be at least {lowest} and below 2^48.")
    if type(value) is int and float in self.kinds:
      value = float(value)  # JSON's 10000 may be either
    return value if value is None or self.factor == 1 else value * self.factor

  def write(self, value: Any) -> Any:
    """Their value for ours; None if there is none."""
    if self.names is not None:
      return next((theirs for theirs, ours in self.names.items() if ours == value), None)
    return value if value is None or self.factor == 1 else value / self.factor


@dataclasses.dataclass(frozen=True)
class Fixed:
  """A setting that must have one of these values; the first is written, if it is to be written."""

  values: tuple[Any, ...]
  written: bool

  def __init__(self, *values: Any, written: bool = True):
    object.__setattr__(self, "values", values)
    object.__setattr__(self, "written", written)


class Same(NamedTuple):
  """A setting that says what others say; a published file has it, and nothing depends on it."""

  said: str  # what it must be, such as "expand hidden_size"
  of: Callable[[Config], Any]  # its value, by the config that `normal` gives


class Free(NamedTuple):
  """A setting that cannot change the function of a trained model, and why."""

  reason: str


size = lambda ours, default=REQUIRED: Field(ours, (int,), default)
size_or_none = lambda ours: Field(ours, (int, type(None)), None)
number = lambda ours, default=REQUIRED, factor=1.0: Field(ours, (float,), default, None, factor)
number_or_none = lambda ours: Field(ours, (float, type(None)), None)
flag = lambda ours, default=REQUIRED: Field(ours, (bool,), default)
choice = lambda ours, names, default=REQUIRED: Field(ours, (), default, names)
free = lambda reason, *names: dict.fromkeys(names, Free(reason))
same = lambda name: Same(name, lambda config: config.get(name))


def whole(config: Config, name: str, default: Any = REQUIRED) -> int:
  """A setting that others follow from: a whole number above 0.

  Raises:
    ExportError: it is missing, or another kind of value.
  """
  value = config.get(name, default)
  if value is REQUIRED:
    raise ExportError(f"{name} is missing.")
  if type(value) is not int or not 0 < value < 2**48:
    raise ExportError(f"{name}={value!r:.80} must be a whole number of at least 1 and below 2^48.")
  return value


def without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
  """A copy of a mapping that lacks these names."""
  return {name: value for name, value in values.items() if name not in names}


def count_of_layers(config: Config) -> int:
  """num_hidden_layers, where a list of all of them is made."""
  if (L := whole(config, "num_hidden_layers")) > 10_000:
    raise ExportError(f"num_hidden_layers={L} is more than 10,000, the most of a hybrid.")
  return L


def agree(config: Config, name: str, value: Any, said: str) -> None:
  """Removes a setting that must be `value`, which follows from others, or be absent or null.

  Raises:
    ExportError: it is something else; the message says what it is compared with.
  """
  given = config.pop(name, None)
  if given is None or (given == value and isinstance(given, bool) is isinstance(value, bool)):
    return
  raise ExportError(
    f"{name}={given!r:.80} is not {said} = {value!r:.80}; correct the one that is wrong."
  )

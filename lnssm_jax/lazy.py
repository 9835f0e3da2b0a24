"""Packages whose names are imported when they are first used."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names_of(
  package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
  """`__getattr__` and `__dir__` of a package.

  Args:
    homes: {name: the module that has it}, or "module:attribute" where that has another name there.
      A module is its own name's home.
  """

  def get(name: str) -> Any:
    if name not in homes:
      raise AttributeError(f"module {package!r} has no attribute {name!r}")
    home, _, attribute = homes[name].partition(":")
    module = importlib.import_module(home)
    return module if home == f"{package}.{name}" else getattr(module, attribute or name)

  return get, lambda: sorted({*vars(sys.modules[package]), *homes})

"""Functions of a user that settings name as MODULE:FUNCTION."""

import importlib
import os
import sys
from typing import Any


def found(name: str) -> Any:
  """The function of a name; its module may be a file of the current folder.

  A command is not in the current folder for Python. Installed modules come first.

  Raises:
    ImportError, AttributeError: there is none.
  """
  module, _, function = name.partition(":")
  if (here := os.getcwd()) not in sys.path:
    sys.path.append(here)
  return getattr(importlib.import_module(module), function)

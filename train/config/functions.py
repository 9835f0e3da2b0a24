"""Functions of a user that settings name as MODULE:FUNCTION."""

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from lnssm_jax.files.printable import printable
from train.messages import first_line

_OURS, _IMPORTS = str(Path(__file__).parents[1]) + os.sep, f"{os.sep}importlib{os.sep}"


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


def explained(error: BaseException) -> str:
  """One line about what a function or its module raised, with the place in a file of the user."""
  stack = traceback.extract_tb(error.__traceback__)
  places = [
    x for x in stack if not x.filename.startswith((_OURS, "<")) and _IMPORTS not in x.filename
  ]
  if places:
    return f"{first_line(error)} ({Path(places[-1].filename).name}, line {places[-1].lineno})"
  plain = isinstance(error, ImportError | AttributeError | TypeError | ValueError)
  return printable(str(error).partition("\n")[0], 200) if plain else first_line(error)

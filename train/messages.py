"""Messages for the user: where they go, and errors as one line."""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from lnssm_jax.files.printable import printable

type Say = Callable[[str], object]  # prints one line for the user


def first_line(error: BaseException) -> str:
  """The type of `error` and the first line of its message, shortened and printable."""
  text = printable(str(error).strip().split("\n")[0], 200)
  return f"{type(error).__name__}: {text}" if text else type(error).__name__


def show(text: object = "", *, end: str = "\n", flush: bool = False) -> None:
  """Prints text of ours on stdout, with names from elsewhere in it: line feeds and tabs stay.

  Raises:
    BrokenPipeError: the reader of the output has exited.
  """
  print(printable(text, keep="\n\t"), end=end, flush=flush)


def show_json(value: Any) -> None:
  """Prints a JSON value on stdout, in ASCII."""
  text = value if isinstance(value, str) else json.dumps(value, indent=2)
  print(text.replace("\x7f", "\\u007f"))  # the one control character that stays in JSON


def show_generated(text: str, *, end: str = "") -> None:
  """Prints the text of a model at once: as it is into a file or pipe, printable on a terminal."""
  is_terminal = sys.stdout is not None and sys.stdout.isatty()
  print(printable(text, keep="\n\t") if is_terminal else text, end=end, flush=True)


def warn(text: str) -> None:
  """Prints a line on stderr."""
  write(sys.stderr, f"{printable(text, keep='\n\t')}\n")


def write(stream: TextIO | None, text: str) -> None:
  """Writes and flushes `text`; no state of `stream` ends the work that it reports on.

  A full disk or a closed stream loses the text, an encoding without a character gets "?". When the
  reader of a pipe has exited, everything after that is discarded.
  """
  if stream is None:  # closed before Python started
    return
  try:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()
  except BrokenPipeError:
    discard(stream)
  except (OSError, ValueError):  # ValueError: closed
    pass


def discard(stream: TextIO) -> None:
  """Lets `stream` write to nowhere, also what its buffer holds when the process exits."""
  with contextlib.suppress(OSError, ValueError):  # not a file
    number = stream.fileno()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def open_standard_streams() -> None:
  """Opens those that are closed, lest other files get their numbers; stdout takes any text."""
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
  with contextlib.suppress(AttributeError, ValueError):  # None, or replaced by a test
    sys.stdout.reconfigure(errors="replace")  # pyrefly: ignore

"""Messages for the user: where they go, and errors as one line."""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TextIO

type Say = Callable[[str], object]  # prints one line for the user


def first_line(error: Exception) -> str:
  """The type of `error` and the first line of its message, shortened."""
  text = str(error).strip().split("\n")[0]
  return f"{type(error).__name__}: {text[:200]}"


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

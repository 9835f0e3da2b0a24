"""Messages for the user: where they go, and errors as one line."""

from collections.abc import Callable

type Say = Callable[[str], object]  # prints one line for the user


def first_line(error: Exception) -> str:
  """The type of `error` and the first line of its message, shortened."""
  text = str(error).strip().split("\n")[0]
  return f"{type(error).__name__}: {text[:200]}"

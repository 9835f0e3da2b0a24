"""The error of everything that reads or makes data."""

from contextlib import contextmanager


class DataError(ValueError):
  """Data that cannot be used. The message names the file, what is wrong and what to do."""


@contextmanager
def writing(path):
  """Turns the operating system's refusal to write at `path` into a `DataError` that names it."""
  try:
    yield
  except OSError as error:
    raise DataError(
      f"cannot write {path}: {error.strerror or error}. Free space or permissions there, or choose"
      " another folder (data.folder)."
    ) from error


@contextmanager
def reading(path):
  """Turns the operating system's refusal to read `path` into a `DataError` that names it."""
  try:
    yield
  except OSError as error:
    raise DataError(f"cannot read {path}: {error.strerror or error}.") from error

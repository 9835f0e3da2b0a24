"""Errors of reading and writing data."""

from contextlib import contextmanager


class DataError(ValueError):
  """Unusable data; the message names the file, the problem and the fix."""


@contextmanager
def writing(path):
  """Converts an OSError while writing `path` to a `DataError` that names it."""
  try:
    yield
  except OSError as error:
    raise DataError(
      f"cannot write {path}: {error.strerror or error}. Free disk space, change permissions, or"
      " use another folder (data.folder)."
    ) from error


@contextmanager
def reading(path):
  """Converts an OSError while reading `path` to a `DataError` that names it."""
  try:
    yield
  except OSError as error:
    raise DataError(f"cannot read {path}: {error.strerror or error}.") from error

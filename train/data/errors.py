"""Errors of reading and writing data."""

from contextlib import contextmanager

from lnssm_jax.files.printable import printable
from lnssm_jax.files.reading import DataError, reading

__all__ = ["DataError", "reading", "writing"]


@contextmanager
def writing(path):
  """Converts an OSError while writing `path` to a `DataError` that names it."""
  try:
    yield
  except OSError as error:
    raise DataError(
      f"cannot write {printable(path, 300)}: {error.strerror or error}. Free disk space, change"
      " permissions, or use another folder."
    ) from error

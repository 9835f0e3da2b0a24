"""Folders that appear atomically."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(path: str | Path, error: type[Exception]) -> Iterator[Path]:
  """Context with a temporary folder that is renamed to `path` once everything is on disk.

  It is removed after an exception.

  Raises:
    error: `path` exists and is not an empty folder.
    OSError: the folder cannot be written.
  """
  path = Path(path).absolute()
  if os.path.lexists(path) and not (path.is_dir() and not path.is_symlink() and _is_empty(path)):
    raise error(f"{path} exists already; use a folder that does not exist.")
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
  partial.mkdir()
  try:
    yield partial
    for inside, _, names in os.walk(partial):
      for name in names:
        _flush(Path(inside, name))
    partial.rename(path)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise
  _flush(path.parent)


def _is_empty(folder: Path) -> bool:
  return next(folder.iterdir(), None) is None


def _flush(path: Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)

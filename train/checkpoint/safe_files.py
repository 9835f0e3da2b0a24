"""Folders that appear atomically, and reading of untrusted files."""

import contextlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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


def regular_file(path: str | Path) -> Path:
  """Returns `path` if it is a regular file, not a link, device or pipe.

  Raises:
    OSError: it is not a regular file.
  """
  path = Path(path)
  if not stat.S_ISREG(path.lstat().st_mode):
    raise OSError(f"{path.name} is not a regular file")
  return path


def read_json(path: str | Path, max_bytes: int) -> dict[str, Any]:
  """Reads the object in a JSON file of at most `max_bytes` bytes.

  Raises:
    OSError: not a regular file, or unreadable.
    ValueError: too large, nested too deeply, not a JSON object, or with a duplicate key.
  """
  path = regular_file(path)
  size = path.stat().st_size
  if size > max_bytes:
    raise ValueError(f"{path.name} has {size:,} bytes, more than {max_bytes:,}")
  try:
    values = json.loads(path.read_bytes(), object_pairs_hook=_unique_keys)
  except RecursionError:
    raise ValueError(f"{path.name} is nested too deeply") from None
  if not isinstance(values, dict):
    raise ValueError(f"{path.name} is not a JSON object")
  return values


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) != len(pairs):
    raise ValueError("an object has a duplicate key")
  return values


def _is_empty(folder: Path) -> bool:
  return next(folder.iterdir(), None) is None


def _flush(path: Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)

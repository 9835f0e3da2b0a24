"""Folders that appear whole, and files from elsewhere that are read with care."""

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
def new_folder(path: str | Path, refuse: type[Exception]) -> Iterator[Path]:
  """A folder beside `path` to write into, which becomes `path` when all is written and flushed.

  After an error nothing is left of it.

  Raises:
    refuse: there is something at `path` already, an empty folder excepted.
    OSError: it cannot be written.
  """
  path = Path(path).absolute()
  if os.path.lexists(path) and not (path.is_dir() and not path.is_symlink() and _is_empty(path)):
    raise refuse(f"{path} is there already; give a folder that does not exist.")
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
  """`path`, if it is a file and no link, device or pipe.

  Raises:
    OSError: it is not.
  """
  path = Path(path)
  if not stat.S_ISREG(path.lstat().st_mode):
    raise OSError(f"{path.name} is not a regular file")
  return path


def read_json(path: str | Path, most: int) -> dict[str, Any]:
  """The object in a JSON file of at most `most` bytes.

  Raises:
    OSError: it is no regular file, or cannot be read.
    ValueError: it is too large, nested too deeply, no JSON object, or names something twice.
  """
  path = regular_file(path)
  size = path.stat().st_size
  if size > most:
    raise ValueError(f"{path.name} has {size:,} bytes, more than {most:,}")
  try:
    values = json.loads(path.read_bytes(), object_pairs_hook=_once)
  except RecursionError:
    raise ValueError(f"{path.name} is nested too deeply") from None
  if not isinstance(values, dict):
    raise ValueError(f"{path.name} holds no JSON object")
  return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) != len(pairs):
    raise ValueError("a name stands twice in one object")
  return values


def _is_empty(folder: Path) -> bool:
  return next(folder.iterdir(), None) is None


def _flush(path: Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)

"""Reading of untrusted files."""

import contextlib
import hashlib
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Version of run folders, checkpoints and exports; `old_formats` reads the one before.
FORMAT = 2


class DataError(ValueError):
  """Unusable data; the message names the file, the problem and the fix."""


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
  """Converts an OSError while reading `path` to a `DataError` that names it."""
  try:
    yield
  except OSError as error:
    raise DataError(f"cannot read {path}: {error.strerror or error}.") from error


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
    values = json.loads(path.read_bytes(), object_pairs_hook=unique_keys)
  except RecursionError:
    raise ValueError(f"{path.name} is nested too deeply") from None
  if not isinstance(values, dict):
    raise ValueError(f"{path.name} is not a JSON object")
  return values


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Dictionary of the pairs of a JSON object; ValueError if a key occurs twice."""
  values = dict(pairs)
  if len(values) != len(pairs):
    raise ValueError("an object has a duplicate key")
  return values


def digest_of(content: dict[str, Any]) -> str:
  """SHA-256 of a JSON object, independent of the order of its keys."""
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

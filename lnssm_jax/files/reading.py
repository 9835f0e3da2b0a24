"""Reading of untrusted files."""

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lnssm_jax.files.checked_json import Shape, check_shape, parse
from lnssm_jax.files.printable import PrintableError, printable

# Version of run folders, checkpoints and exports; `old_formats` reads the one before.
FORMAT = 2

# Errors of network file systems and disks that may be gone a moment later, and pauses in seconds.
TRANSIENT = {
  errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EBUSY,
  errno.EMFILE, errno.ENFILE,
}  # fmt: skip
PAUSES = (0.1, 0.5, 2.0)


class DataError(PrintableError, ValueError):
  """Unusable data; the message names the file, the problem and the fix."""


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
  """Converts an OSError while reading `path` to a `DataError` that names it."""
  try:
    yield
  except OSError as error:
    raise DataError(f"cannot read {printable(path, 300)}: {error.strerror or error}.") from error


def open_regular(path: str | Path, *, follow_links: bool = False) -> io.BufferedReader:
  """Opens a regular file for reading; never waits for the other end of a pipe.

  Args:
    follow_links: for files that users name, which may be elsewhere; False in our own folders.

  Raises:
    OSError: it is a link, folder, pipe or device, or cannot be read.
  """
  return os.fdopen(descriptor_of(path, os.O_RDONLY | os.O_NONBLOCK, follow_links), "rb")


def descriptor_of(path: str | Path, flags: int, follow_links: bool = False) -> int:
  """`os.open` of a regular file, with `OSError` as `open_regular`."""
  flags |= os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
  try:
    descriptor = os.open(path, flags, 0o666)
  except OSError as error:
    if error.errno == errno.ELOOP and not follow_links:
      raise OSError(f"{Path(path).name} is a link; links are not followed") from None
    if error.errno == errno.ENXIO:  # a socket
      raise OSError(f"{Path(path).name} is not a regular file") from None
    raise
  if not stat.S_ISREG(os.fstat(descriptor).st_mode):
    os.close(descriptor)
    raise OSError(f"{Path(path).name} is not a regular file")
  return descriptor


def read_bytes(path: str | Path, max_bytes: int, *, follow_links: bool = False) -> bytes:
  """Content of a regular file of at most `max_bytes` bytes.

  Raises:
    OSError: as `open_regular`.
    ValueError: it is larger.
  """
  with open_regular(path, follow_links=follow_links) as file:
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
      raise ValueError(f"{Path(path).name} has {size:,} bytes, more than {max_bytes:,}")
    return file.read(size)  # a buffer of max_bytes would be allocated


def is_transient(error: BaseException | None) -> bool:
  """Whether an error may be gone a moment later."""
  return isinstance(error, OSError) and error.errno in TRANSIENT


def retried[T](read: Callable[[], T]) -> T:
  """`read()`, called again after a short pause if it raises an OSError that may be transient."""
  for pause in PAUSES:
    try:
      return read()
    except OSError as error:
      if not is_transient(error):
        raise
    time.sleep(pause)
  return read()


def read_json(
  path: str | Path,
  max_bytes: int,
  *,
  follow_links: bool = False,
  strict: bool = True,
  shape: Shape | None = None,
) -> dict[str, Any]:
  """Reads the object in a JSON file of at most `max_bytes` bytes.

  Args:
    follow_links: as of `open_regular`.
    strict: as of `checked_json.parse`.
    shape: of the object, as of `checked_json.check_shape`.

  Raises:
    OSError: not a regular file, or unreadable.
    ValueError: too large, or no JSON object of this shape; the message names the file.
  """
  name = Path(path).name
  content = retried(lambda: read_bytes(path, max_bytes, follow_links=follow_links))
  try:
    values = parse(content, strict=strict)
    if not isinstance(values, dict):
      raise ValueError("not a JSON object")
    check_shape(values, {} if shape is None else shape)
  except ValueError as error:
    raise ValueError(f"{name}: {error}") from None
  return values


def digest_of(content: dict[str, Any]) -> str:
  """SHA-256 of a JSON object, independent of the order of its keys."""
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

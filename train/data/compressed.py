"""Text files, also compressed as .gz, .xz or .zst, whose expansion is limited."""

import gzip
import importlib
import lzma
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from lnssm_jax.files.reading import open_regular
from train.data.errors import DataError

# A compressed file could otherwise expand without limit.
MAX_ROW = 1 << 28  # bytes
MAX_EXPANSION = 200  # times its size, beyond MAX_ROW

# In the standard library from Python 3.14 on; before, a package with the same interface.
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


class Damaged(Exception):
  """A compressed file ends early, or is of another format than its name says."""


def plain(path: Path) -> Path:
  """The name of a file without the suffix of its compression."""
  return path.with_suffix("") if path.suffix.lower() in _FORMATS else path


def open_text(path: Path) -> "Expanded | BinaryIO":
  """Opens a regular file for reading its content, expanded if its name says so.

  Raises:
    OSError: it cannot be read.
    DataError: .zst, and the package that reads it is not installed.
  """
  expand = _FORMATS.get(path.suffix.lower())
  file = open_regular(path, follow_links=True)
  if expand is None:
    return file
  try:
    return Expanded(path, file, *expand(path, file))
  except BaseException:
    file.close()
    raise


class Limit:
  """Counts the expanded bytes of a file, up to a limit that no text reaches.

  Raises:
    DataError: they are more than MAX_ROW, and more than MAX_EXPANSION times the size of the file.
  """

  def __init__(self, path: Path, size: int):
    self._path, self._left = path, max(MAX_ROW, MAX_EXPANSION * size)

  def count(self, size: int) -> None:
    self._left -= size
    if self._left < 0:
      raise DataError(
        f"{self._path} expands to more than {MAX_EXPANSION} times its size, as no text does. If it"
        " is one, decompress it first."
      )


class Expanded:
  """The content of a compressed file.

  Raises:
    Damaged: it cannot be expanded.
    DataError: as `Limit`.
  """

  def __init__(self, path: Path, file: BinaryIO, inner: Any, errors: tuple[type[Exception], ...]):
    self._file, self._inner, self._errors = file, inner, errors
    self._limit = Limit(path, os.fstat(file.fileno()).st_size)

  def __enter__(self) -> "Expanded":
    return self

  def __exit__(self, *_) -> None:
    self._inner.close()
    self._file.close()

  def read(self) -> bytes:
    return b"".join(iter(lambda: self._counted(self._inner.read, 1 << 20), b""))

  def readline(self, size: int) -> bytes:
    return self._counted(self._inner.readline, size)

  def _counted(self, read: Callable[[int], bytes], size: int) -> bytes:
    try:
      content = read(size)
    except (*self._errors, EOFError) as error:
      raise Damaged(str(error)) from error
    self._limit.count(len(content))
    return content


def _gz(path: Path, file: BinaryIO) -> tuple[Any, tuple[type[Exception], ...]]:
  return gzip.GzipFile(fileobj=file), (gzip.BadGzipFile, zlib.error)


def _xz(path: Path, file: BinaryIO) -> tuple[Any, tuple[type[Exception], ...]]:
  return lzma.LZMAFile(file), (lzma.LZMAError,)


def _zst(path: Path, file: BinaryIO) -> tuple[Any, tuple[type[Exception], ...]]:
  try:
    zstd = importlib.import_module(ZSTD)
  except ImportError:
    raise DataError(f"{path} needs the package {ZSTD}: pip install {ZSTD}") from None
  return zstd.ZstdFile(file), (zstd.ZstdError,)


_FORMATS = {".gz": _gz, ".xz": _xz, ".zst": _zst}
SUFFIXES = tuple(_FORMATS)

"""Safetensors files: named arrays, each read when it is asked for, and written all at once.

8 bytes: N, little endian   N bytes: {name: {dtype, shape, data_offsets}} as JSON   the data
"""

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lnssm_jax.files.checked_json import check_shape, parse
from lnssm_jax.files.reading import open_regular
from lnssm_jax.pretrained.manifest import ExportError

_MAX_HEADER = 100_000_000  # bytes, the format's own limit
_DTYPES = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U64": np.uint64,
  "U32": np.uint32,
  "U16": np.uint16,
  "U8": np.uint8,
  "BOOL": np.bool_,
}


def write(path: str | Path, arrays: Mapping[str, np.ndarray], metadata: Any = None) -> None:
  """Writes a file, or replaces it, with the permissions that other new files have.

  Raises:
    ExportError: the package `safetensors` is not installed.
    OSError: it cannot be written; it names `path`, where nothing new is left.
  """
  try:
    import safetensors.numpy
  except ImportError:
    raise ExportError(
      "writing a model needs the package safetensors: pip install safetensors"
    ) from None
  path = Path(path)
  new = not path.exists()
  path.touch()  # the package's own file is readable by its owner alone
  mode = path.stat().st_mode & 0o777
  try:
    safetensors.numpy.save_file({**arrays}, path, metadata=metadata)
    path.chmod(mode)
  except safetensors.SafetensorError as error:
    if new:
      path.unlink(missing_ok=True)
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number is None:
      raise
    raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


class _Entry(NamedTuple):
  dtype: np.dtype
  shape: tuple[int, ...]
  begin: int  # of its bytes in the file
  end: int


class Tensors(Mapping[str, np.ndarray]):
  """The arrays of a safetensors file by name. Indexing reads one, bit for bit.

  Raises:
    OSError: the file is no regular file, or cannot be read.
    ValueError: it is damaged: the header and the file do not agree byte for byte.
  """

  def __init__(self, path: str | Path):
    self.path = Path(path)
    self._pages: np.ndarray | None = None
    with open_regular(path) as file:
      size = os.fstat(file.fileno()).st_size
      length = int.from_bytes(file.read(8), "little")
      if length > min(_MAX_HEADER, size - 8):
        raise ValueError(f"{self.path.name} ends in its header")
      header = file.read(length)
    try:
      values = parse(header)
      check_shape(values, {str: {}}, "the header")
      values.pop("__metadata__", None)
      self._entries = {name: _entry(x, 8 + length) for name, x in values.items()}
    except (ValueError, LookupError, TypeError) as error:
      raise ValueError(f"the header of {self.path.name} is damaged ({error})") from None
    bounds = sorted((x.begin, x.end) for x in self._entries.values())
    inner = zip([(0, 8 + length), *bounds], [*bounds, (size, size)], strict=True)
    if any(before[1] != after[0] for before, after in inner):
      raise ValueError(f"{self.path.name} has {size:,} bytes, other than its header says")

  def __getitem__(self, name: str) -> np.ndarray:
    dtype, shape, begin, end = self._entries[name]
    with open_regular(self.path) as file:
      content = np.fromfile(file, np.uint8, end - begin, offset=begin)
    return content.view(dtype).reshape(shape)

  def mapped(self, name: str) -> np.ndarray:
    """An array as pages of the file: memory is used for the parts that are read, while they are."""
    dtype, shape, begin, end = self._entries[name]
    if self._pages is None:
      with open_regular(self.path) as file:
        self._pages = np.memmap(file, np.uint8, mode="r")
    return self._pages[begin:end].view(dtype, np.ndarray).reshape(shape)

  def __iter__(self) -> Iterator[str]:
    return iter(self._entries)

  def __len__(self) -> int:
    return len(self._entries)

  def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of an array, without reading it."""
    return str(self._entries[name].dtype), self._entries[name].shape


def is_finite(x: np.ndarray) -> bool:
  """Whether no number of an array is NaN or infinite.

  By their bits, without a temporary array: as signed integers those of a positive sign are the
  largest of all, and as unsigned ones those of a negative sign.
  """
  x, bits = x.reshape(-1), 8 * x.itemsize
  if not x.size or x.dtype.kind in "biu":
    return True
  exponent = int(np.array(np.inf, x.dtype).view(f"u{x.itemsize}"))
  return bool(
    x.view(f"i{x.itemsize}").max() < exponent
    and x.view(f"u{x.itemsize}").max() < exponent + (1 << (bits - 1))
  )


def _entry(values: dict, start: int) -> _Entry:
  shape, (begin, end) = values["shape"], values["data_offsets"]
  if any(type(n) is not int or not 0 <= n < 2**48 for n in itertools.chain(shape, (begin, end))):
    raise ValueError("shapes and offsets are not whole numbers")
  dtype = np.dtype(_DTYPES[values["dtype"]])
  if end - begin != math.prod(shape) * dtype.itemsize:
    raise ValueError(f"{end - begin} bytes are not of shape {shape[:9]}")
  return _Entry(dtype, tuple(shape), start + begin, start + end)

"""Arrays in files, read in blocks that are compared with checksums.

A file that is mapped into memory hands out whatever is on the disk by then: damage after a check at
the start would be trained on, and a file that was cut ends the process (SIGBUS). Here every slice
is read from the disk and compared, and what is wrong raises.
"""

import functools
import os
import weakref
import zlib
from io import BufferedReader
from pathlib import Path

import numpy as np

from lnssm_jax.files.reading import retried
from train.data.errors import DataError, reading

BLOCK = 1 << 14  # bytes; 16 KiB take 10 to 20 us to compare


class Checksums:
  """CRC-32 of each block of a stream of bytes, the last of which may be shorter."""

  def __init__(self) -> None:
    self._finished: list[int] = []
    self._last, self._filled = 0, 0  # of the block that is not full

  def update(self, data: memoryview | bytes) -> None:
    """Appends bytes to the stream."""
    data = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while len(data):
      piece, data = data[: BLOCK - self._filled], data[BLOCK - self._filled :]
      self._last, self._filled = zlib.crc32(piece, self._last), self._filled + len(piece)
      if self._filled == BLOCK:
        self._finished.append(self._last)
        self._last, self._filled = 0, 0

  def array(self) -> np.ndarray:
    """uint32 [blocks], little-endian."""
    return np.array(self._finished + [self._last] * (self._filled > 0), "<u4")


def blocks_of(size: int) -> int:
  """How many blocks a file of `size` bytes has."""
  return -(-size // BLOCK)


class CheckedArray:
  """One-dimensional array in a file without header; slices are read when they are asked for.

  Args:
    file: its size is a multiple of that of an item. It may be closed afterwards.
    path: of the file, for messages.

  Attributes:
    checksums: uint32 [blocks] of `Checksums`; None reads without comparing.
    nbytes: size of the file when it was opened.
  """

  def __init__(self, file: BufferedReader, path: str, dtype: np.typing.DTypeLike):
    self.path, self.dtype = path, np.dtype(dtype)
    self.checksums: np.ndarray | None = None
    self.nbytes = os.fstat(file.fileno()).st_size
    self._descriptor = os.dup(file.fileno())
    weakref.finalize(self, os.close, self._descriptor)

  def __len__(self) -> int:
    return self.nbytes // self.dtype.itemsize

  def __getitem__(self, items: slice) -> np.ndarray:
    """A copy of the items of a slice without a step.

    Raises:
      DataError: a block is not as it was written, or cannot be read.
    """
    start, stop, step = items.indices(len(self))
    if step != 1:
      raise IndexError(f"step={step} must be 1.")
    return self.read(start, max(start, stop))

  def read(self, start: int, stop: int, *, compare: bool = True) -> np.ndarray:
    """Items start, ..., stop - 1; without `compare` no block is compared, which is faster."""
    first, last = start * self.dtype.itemsize, stop * self.dtype.itemsize
    if not compare or self.checksums is None or first == last:
      return np.frombuffer(self._bytes(first, last), self.dtype)
    begin = first // BLOCK * BLOCK
    raw = self._bytes(begin, min(-(-last // BLOCK) * BLOCK, self.nbytes))
    for offset in range(0, len(raw), BLOCK):
      number = (begin + offset) // BLOCK
      if zlib.crc32(raw[offset : offset + BLOCK]) != self.checksums[number]:
        checksums = Path(self.path).with_suffix(".crc32").name
        raise DataError(
          f"{self.path}, bytes {begin + offset} to {begin + offset + BLOCK}, have another checksum "
          f"than {checksums} says: one of the two files has changed since it was written. Restore "
          "it, or create both again with `lnssm-train tokenize --force`."
        )
    return np.frombuffer(raw[first - begin : last - begin], self.dtype)

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    return np.asarray(self[:], dtype)

  def _bytes(self, first: int, last: int) -> memoryview:
    """Bytes first, ..., last - 1 of the file."""
    pieces = []
    while first < last:
      with reading(self.path):
        read = functools.partial(os.pread, self._descriptor, last - first, first)
        piece = retried(read)
      if not piece:
        size = os.fstat(self._descriptor).st_size
        raise DataError(
          f"{self.path} has {size} bytes, but had {self.nbytes} when it was opened. Restore it."
        )
      pieces.append(piece)
      first += len(piece)
    return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))

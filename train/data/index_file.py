"""The index of token files, `.idx`: header, sizes, pointers and documents, and whether they fit.

    offset   bytes   field
    0        9       magic "MMIDIDX" and two zero bytes
    9        8       version, 1
    17       1       dtype code: 1 uint8, 3 int16, 4 int32, 5 int64, 8 uint16
    18       8       N, the number of sequences
    26       8       D, the length of doc_index: the number of documents + 1
    34       4 N     sizes, int32: tokens of each sequence
    .        8 N     pointers, int64: byte offset of each sequence in .bin
    .        8 D     doc_index, int64: the sequence where each document starts; first 0, last N

with all numbers little-endian.
"""

import dataclasses
import struct
from typing import Any

import numpy as np

from train.data.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
UNSUPPORTED = {2: "int8", 6: "floating point", 7: "floating point"}
REMAKE = "Create the pair again with `lnssm-train tokenize`, or copy both files again."


@dataclasses.dataclass(frozen=True)
class Index:
  """Content of an `.idx`; arrays as the attributes of `train.data.indexed.IndexedDataset`."""

  dtype: np.dtype[Any]
  sizes: np.ndarray
  pointers: np.ndarray
  doc_index: np.ndarray


def parse(path: str, idx: np.ndarray) -> Index:
  """The index in the bytes `idx`, uint8 [bytes], as views; raises DataError if there is none.

  Args:
    path: for messages.
  """
  code, N, D = _read_header(path, idx)
  offset = HEADER.size
  return Index(
    np.dtype(DTYPES[code]).newbyteorder("<"),
    np.frombuffer(idx, "<i4", N, offset),
    np.frombuffer(idx, "<i8", N, offset + 4 * N),
    np.frombuffer(idx, "<i8", D, offset + 12 * N),
  )


def packed(code: int, sizes: np.ndarray, item: int) -> list[bytes | np.ndarray]:
  """Content of the index of documents of `sizes` tokens, int32 [N], each of `item` bytes."""
  N = len(sizes)
  pointers = np.zeros(N, "<i8")
  np.cumsum(sizes[:-1].astype("<i8") * item, out=pointers[1:])
  header = HEADER.pack(MAGIC, 1, code, N, N + 1)
  return [header, sizes, pointers, np.arange(N + 1, dtype="<i8")]


def _read_header(path: str, idx: np.ndarray) -> tuple[int, int, int]:
  """Checks the header of a mapped `.idx` and returns (dtype code, N, D)."""

  def mismatch(offset: int, field: str, found: object, expected: str) -> DataError:
    return DataError(
      f"{path}, offset {offset} ({field}): found {found}, expected {expected}. {REMAKE}"
    )

  if len(idx) < len(MAGIC) or idx[: len(MAGIC)].tobytes() != MAGIC:
    found = repr(idx[: len(MAGIC)].tobytes())
    raise mismatch(0, "magic", found, f"{MAGIC!r}; this is not an index file, or it is damaged")
  if len(idx) < HEADER.size:
    raise mismatch(len(idx), "end of file", f"{len(idx)} bytes", f"{HEADER.size} of header alone")
  _, version, code, N, D = HEADER.unpack(idx[: HEADER.size].tobytes())
  if version != 1:
    raise mismatch(9, "version", version, "1, the only version there is")
  if code not in DTYPES:
    what = f"{code} ({UNSUPPORTED.get(code, 'unknown')})"
    names = ", ".join(f"{c} {name}" for c, name in DTYPES.items())
    raise mismatch(17, "dtype code", what, f"one for token ids: {names}")
  if N == 0:
    raise mismatch(18, "number of sequences", 0, "at least one; the dataset is empty")
  # Python integers do not overflow, and nothing is allocated before the counts are checked.
  room = len(idx) - HEADER.size
  if room // 12 < N:
    raise mismatch(18, "number of sequences", N, f"at most {room // 12} in {len(idx)} bytes")
  if D < 2 or room // 8 < D:
    raise mismatch(26, "length of doc_index", D, f"2 to {room // 8} in {len(idx)} bytes")
  end = HEADER.size + 12 * N + 8 * D
  if len(idx) < end:
    wanted = f"{end} for {N} sequences and {D - 1} documents; the file is cut off"
    raise mismatch(len(idx), "end of file", f"{len(idx)} bytes", wanted)
  if len(idx) > end:
    extra = len(idx) - end
    what = f"{extra} more bytes" + (" (modes of a multimodal dataset?)" if extra == N else "")
    raise mismatch(end, "end of file", what, f"the file to end here, after {D - 1} documents")
  return code, N, D


def check(index: Index, prefix: str, bin_bytes: int) -> None:
  """Checks that sizes, pointers and doc_index describe a `.bin` of `bin_bytes` bytes."""
  sizes, pointers, docs = index.sizes, index.pointers, index.doc_index
  N, item = len(sizes), index.dtype.itemsize
  idx, bin = prefix + ".idx", prefix + ".bin"

  def reject(field: str, i: int, expected: str) -> None:
    values, start, width = {
      "size": (sizes, HEADER.size, 4),
      "pointer": (pointers, HEADER.size + 4 * N, 8),
      "doc_index": (docs, HEADER.size + 12 * N, 8),
    }[field]
    raise DataError(
      f"{idx}, offset {start + width * i} ({field} {i}): found {int(values[i])}, expected"
      f" {expected}. {REMAKE}"
    )

  def reject_any(bad: np.ndarray, field: str, expected: str) -> None:
    if bad.any():
      reject(field, int(np.argmax(bad)), expected)

  if bin_bytes % item:
    raise DataError(
      f"{bin}: found {bin_bytes} bytes, expected a multiple of {item}, the bytes of one"
      f" {index.dtype.name} token. {REMAKE}"
    )
  reject_any(sizes < 0, "size", "a number of tokens, 0 or more")
  reject_any(pointers < 0, "pointer", "a byte offset, 0 or more")
  reject_any(pointers > bin_bytes, "pointer", f"an offset inside the {bin_bytes} bytes of {bin}")
  reject_any(pointers % item != 0, "pointer", f"a multiple of the {item} bytes of a token")
  room = (bin_bytes - pointers) // item  # pointers are in range, so this cannot overflow
  reject_any(sizes > room, "size", f"a sequence that ends inside the {bin_bytes} bytes of {bin}")
  ends = pointers + sizes.astype(np.int64) * item
  gap = pointers != np.append(0, ends[:-1])
  reject_any(gap, "pointer", "the end of the sequence before; they must neither overlap nor skip")
  if ends[-1] != bin_bytes:
    raise DataError(
      f"{bin}: found {bin_bytes} bytes, expected {int(ends[-1])} for the {N} sequences of"
      f" {idx}. The two files are not of one pair, or one is damaged. {REMAKE}"
    )
  reject_any((docs < 0) | (docs > N), "doc_index", f"the number of a sequence, 0 to {N}")
  if docs[0] != 0:
    reject("doc_index", 0, "0, the first sequence")
  reject_any(np.diff(docs, prepend=0) < 0, "doc_index", "no less than the one before")
  if docs[-1] != N:
    reject("doc_index", len(docs) - 1, f"{N}, the number of sequences")

"""Damaged and hostile token files: rejected with a message, never read out of bounds."""

import struct
from pathlib import Path

import numpy as np
import pytest

from train.data import DataError, IndexedDataset

DOCUMENTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
N, D = 4, 5
SIZES, POINTERS, DOCS = 34, 34 + 4 * N, 34 + 12 * N
END = DOCS + 8 * D


@pytest.fixture
def prefix(write_pair):
  return write_pair(DOCUMENTS)


def put(path, offset, kind, *values):
  raw = bytearray(Path(path).read_bytes())
  data = struct.pack(f"<{len(values)}{kind}", *values)
  raw[offset : offset + len(data)] = data
  Path(path).write_bytes(raw)


def check_rejected(prefix, *wanted):
  """Opening raises a DataError that contains each of `wanted` and the fix."""
  with pytest.raises(DataError) as caught:
    IndexedDataset(prefix)
  message = str(caught.value)
  for text in wanted:
    assert text in message
  assert "lnssm-train tokenize" in message or "use the prefix" in message


@pytest.mark.parametrize(
  ("offset", "kind", "values", "wanted"),
  [
    (0, "B", [0], ("offset 0 (magic)", "this is not an index file")),
    (8, "B", [1], ("offset 0 (magic)",)),
    (9, "Q", [2], ("offset 9 (version)", "found 2", "expected 1")),
    (9, ">Q", [1], ("offset 9 (version)", f"found {1 << 56}")),  # the other byte order
    (17, "B", [2], ("offset 17 (dtype code)", "found 2 (int8)", "8 uint16")),
    (17, "B", [6], ("offset 17 (dtype code)", "found 6 (floating point)")),
    (17, "B", [7], ("offset 17 (dtype code)", "found 7 (floating point)")),
    (17, "B", [0], ("offset 17 (dtype code)", "found 0 (unknown)")),
    (17, "B", [255], ("offset 17 (dtype code)", "found 255 (unknown)")),
    (18, "Q", [0], ("offset 18 (number of sequences)", "found 0", "the dataset is empty")),
    (18, "Q", [5], ("end of file", "the file is cut off")),
    (18, "Q", [3], (f"offset {END - 12} (end of file)", "found 12 more bytes")),
    (18, "Q", [2**63], ("offset 18 (number of sequences)", f"found {2**63}", "at most")),
    (18, "Q", [2**63 - 1], ("offset 18 (number of sequences)", "at most")),
    (18, "Q", [2**64 - 1], ("offset 18 (number of sequences)", "at most")),
    (18, "Q", [2**62], ("offset 18 (number of sequences)", "at most")),  # times 4: 0 in 64 bits
    (26, "Q", [0], ("offset 26 (length of doc_index)", "found 0")),
    (26, "Q", [1], ("offset 26 (length of doc_index)", "found 1", "2 to")),
    (26, "Q", [4], ("found 8 more bytes",)),
    (26, "Q", [6], ("the file is cut off",)),
    (26, "Q", [2**61], ("offset 26 (length of doc_index)", f"found {2**61}")),  # times 8: 0
    (26, "Q", [2**63 + 5], ("offset 26 (length of doc_index)",)),
    (18, "Q", [2**61 + N, D], ("offset 18 (number of sequences)",)),
    (SIZES, "i", [-1], (f"offset {SIZES} (size 0)", "found -1")),
    (SIZES + 8, "i", [-(2**31)], (f"offset {SIZES + 8} (size 2)", f"found {-(2**31)}")),
    (SIZES + 12, "i", [5], ("(size 3)", "found 5", "ends inside the 20 bytes")),
    (SIZES, "i", [2**31 - 1], ("(size 0)", f"found {2**31 - 1}", "ends inside")),
    (SIZES, "i", [2], ("(pointer 1)", "neither overlap nor skip")),
    (SIZES, "i", [4], ("(pointer 1)", "neither overlap nor skip")),
    (POINTERS, "q", [-2], (f"offset {POINTERS} (pointer 0)", "found -2")),
    (POINTERS + 8, "q", [22], (f"offset {POINTERS + 8} (pointer 1)", "inside the 20 bytes")),
    (POINTERS + 8, "q", [2**63 - 1], ("(pointer 1)", f"found {2**63 - 1}", "inside")),
    (POINTERS + 8, "q", [2**63 - 2], ("(pointer 1)", "inside")),
    (POINTERS + 8, "q", [-(2**63)], ("(pointer 1)", f"found {-(2**63)}")),
    (POINTERS + 8, "q", [7], ("(pointer 1)", "found 7", "a multiple of the 2 bytes")),
    (POINTERS + 8, "q", [4], ("(pointer 1)", "neither overlap nor skip")),
    (POINTERS + 8, "q", [8], ("(pointer 1)", "neither overlap nor skip")),
    (POINTERS, "q", [2], ("(pointer 0)", "neither overlap nor skip")),
    (POINTERS, "q", [6, 0], ("(pointer 0)", "neither overlap nor skip")),  # another order
    (DOCS, "q", [1], (f"offset {DOCS} (doc_index 0)", "found 1", "expected 0")),
    (DOCS + 8, "q", [3], (f"offset {DOCS + 16} (doc_index 2)", "found 2", "no less than")),
    (DOCS + 8, "q", [-1], ("(doc_index 1)", "found -1")),
    (DOCS + 8, "q", [2**63 - 1], ("(doc_index 1)", "the number of a sequence, 0 to 4")),
    (DOCS + 32, "q", [3], ("(doc_index 4)", "found 3", "expected 4, the number of sequences")),
    (DOCS + 32, "q", [5], ("(doc_index 4)", "found 5")),
  ],
)
def test_indexed_wrong_field_named(prefix, offset, kind, values, wanted):
  if kind.startswith(">"):
    put(prefix + ".idx", offset, "Q", int.from_bytes(struct.pack(kind, *values), "little"))
  else:
    put(prefix + ".idx", offset, kind, *values)
  check_rejected(prefix, prefix + ".idx", *wanted)


def test_indexed_truncated_index_rejected(prefix):
  path = Path(prefix + ".idx")
  whole = path.read_bytes()
  assert len(whole) == END
  for length in range(END):
    path.write_bytes(whole[:length])
    check_rejected(prefix, str(path), "found" if length else "is empty (0 bytes)")


@pytest.mark.parametrize("extra", [1, N, 8, 1000])
def test_indexed_trailing_bytes_rejected(prefix, extra):
  with open(prefix + ".idx", "ab") as file:
    file.write(bytes(extra))
  check_rejected(prefix, f"offset {END} (end of file)", f"found {extra} more bytes")


@pytest.mark.parametrize(
  ("length", "wanted"),
  [
    (0, "is empty (0 bytes)"),
    (1, "expected a multiple of 2"),
    (19, "expected a multiple of 2"),
    (21, "expected a multiple of 2"),
    (18, "ends inside the 18 bytes"),
    (2, "inside the 2 bytes"),
    (22, "found 22 bytes, expected 20 for the 4 sequences"),
  ],
)
def test_indexed_wrong_token_file_length_rejected(prefix, length, wanted):
  path = Path(prefix + ".bin")
  path.write_bytes((path.read_bytes() + bytes(10))[:length])
  check_rejected(prefix, str(path), wanted)


@pytest.mark.parametrize("code", [1, 4, 5])
def test_indexed_wrong_dtype_width_rejected(prefix, code):
  put(prefix + ".idx", 17, "B", code)
  check_rejected(prefix, prefix + ".")


def test_indexed_missing_file_named(prefix, tmp_path):
  check_rejected(str(tmp_path / "absent"), "absent.idx does not exist; create it with")
  check_rejected(prefix + ".bin", f"use the prefix of the pair, {prefix!r}")
  Path(prefix + ".bin").unlink()
  check_rejected(prefix, ".bin does not exist", "only", ".idx exists")


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_indexed_folder_as_file_rejected(prefix, end):
  Path(prefix + end).unlink()
  Path(prefix + end).mkdir()
  check_rejected(prefix, f"{prefix}{end} is not a file")


def test_indexed_prefix_below_file_rejected(prefix):
  check_rejected(prefix + ".bin/inside", "does not exist")


def test_indexed_id_outside_vocabulary_named(write_pair):
  data = IndexedDataset(write_pair([[1, 2], [3, 99, 4, 100]]))
  data.check_tokens(101)
  for size, found in ((100, "token 5 has the id 100"), (50, "token 3 has the id 99")):
    with pytest.raises(DataError, match=rf"pair.bin: {found}, but ids must be in \[0, {size}\)"):
      data.check_tokens(size)


def test_indexed_largest_id_of_dtype_found(write_pair):
  data = IndexedDataset(write_pair([[65_535]]))
  data.check_tokens(65_536)
  with pytest.raises(DataError, match="token 0 has the id 65535"):
    data.check_tokens(65_535)


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
def test_indexed_negative_id_named(write_pair, dtype):
  prefix = write_pair([[1, 2, 3]], dtype=dtype)
  raw = np.array([1, -2, 3], dtype).tobytes()
  Path(prefix + ".bin").write_bytes(raw)
  with pytest.raises(DataError, match="token 1 has the id -2"):
    IndexedDataset(prefix).check_tokens(2**15)


def test_indexed_wrong_id_in_long_file_found(write_pair, monkeypatch):
  monkeypatch.setattr("train.data.indexed.SCAN", 7)
  for position in range(20):
    ids = np.zeros(20, np.int32)
    ids[position] = 300
    data = IndexedDataset(write_pair([ids], f"at{position}"))
    with pytest.raises(DataError, match=rf"token {position} has the id 300"):
      data.check_tokens(300)


def damage(rng, raw):
  """Flips bits, overwrites, truncates, inserts, or sets a field to an extreme value."""
  raw = bytearray(raw)
  for _ in range(rng.integers(1, 4)):
    at = int(rng.integers(len(raw))) if raw else 0
    match rng.integers(6):
      case 0 if raw:
        raw[at] ^= 1 << int(rng.integers(8))
      case 1:
        count = int(rng.integers(1, 17))
        raw[at : at + count] = rng.bytes(count)
      case 2:
        del raw[at:]
      case 3:
        raw[at:at] = rng.bytes(int(rng.integers(1, 20)))
      case 4:
        extreme = (0, 1, -1, 2, 2**31, 2**61, 2**62, 2**63 - 1, -(2**63), 2**63 - 2)
        value = int(extreme[rng.integers(len(extreme))])
        at = int(rng.choice([9, 18, 26, *range(SIZES, END, 4)]))
        raw[at : at + 8] = value.to_bytes(8, "little", signed=True)
      case _:
        raw[17:18] = bytes([int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9]))])
  return bytes(raw)


def fuzz(prefix, seeds):
  """Counts of (opened, rejected); any other outcome is an error."""
  counts = [0, 0]
  whole = {end: Path(prefix + end).read_bytes() for end in (".idx", ".bin")}
  for seed in seeds:
    rng = np.random.default_rng(seed)
    hurt = f"{prefix}{seed}"
    for end, raw in whole.items():
      hit = end == ".idx" or rng.random() < 0.2
      Path(hurt + end).write_bytes(damage(rng, raw) if hit else raw)
    try:
      data = IndexedDataset(hurt)
    except DataError:
      counts[1] += 1
    else:
      counts[0] += 1
      check_that_all_lies_inside(data, Path(hurt + ".bin").stat().st_size)
    for end in whole:
      Path(hurt + end).unlink()
  return counts


def check_that_all_lies_inside(data, size):
  assert data.num_sequences == len(data.sizes) >= 1
  for i in range(data.num_sequences):
    start, count = int(data.pointers[i]), int(data.sizes[i])
    assert start >= 0 and count >= 0 and start + count * data.dtype.itemsize <= size
    assert len(data.sequence(i)) == count
  assert data.document_starts.min() >= 0 and data.document_starts.max() <= data.num_tokens


@pytest.mark.slow
def test_indexed_damaged_files_open_safely_or_raise(prefix):
  opened, rejected = fuzz(prefix, range(1500))
  assert rejected > 1000
  assert opened > 10  # damage that is repaired by chance, or only moves the ends of documents


@pytest.mark.slow
def test_indexed_damaged_files_many_open_safely_or_raise(prefix):
  opened, rejected = fuzz(prefix, range(10_000, 40_000))
  assert opened + rejected == 30_000 and opened > 100

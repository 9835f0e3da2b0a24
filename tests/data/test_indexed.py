"""Writing and reading token files, compared with files of other programs."""

import hashlib
import itertools
import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from train.data import DataError, IndexedDataset, IndexedWriter, dtype_for

DOCUMENTS = [[1, 2, 3], [500, 0], [65_499], [7] * 10]


def sha256(path):
  return hashlib.sha256(path.read_bytes()).hexdigest()


def left_in(folder):
  return sorted(path.name for path in folder.iterdir())


def test_indexed_file_bytes_match_format(write_pair):
  prefix = write_pair([[1, 2, 3], [258]])
  assert Path(prefix + ".bin").read_bytes() == b"\x01\x00\x02\x00\x03\x00\x02\x01"
  expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 3, 1, 0, 6, 0, 1, 2)
  assert Path(prefix + ".idx").read_bytes() == expected


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "uint16"])
def test_indexed_round_trip_exact(write_pair, dtype):
  documents = [[ids[0] % 128] * len(ids) for ids in DOCUMENTS]
  data = IndexedDataset(write_pair(documents, dtype=dtype))
  assert [data.sequence(i).tolist() for i in range(data.num_sequences)] == documents
  assert data.dtype == np.dtype(dtype)
  assert data.tokens[:].tolist() == list(itertools.chain(*documents))
  assert data.num_tokens == 16
  assert data.num_documents == data.num_sequences == 4
  assert data.sizes.tolist() == [3, 2, 1, 10]
  assert data.doc_index.tolist() == [0, 1, 2, 3, 4]
  assert data.document_starts.tolist() == [0, 3, 5, 6]
  assert data.pointers.tolist() == [start * data.dtype.itemsize for start in (0, 3, 5, 6)]


def test_indexed_sequence_out_of_range_rejected(write_pair):
  data = IndexedDataset(write_pair(DOCUMENTS))
  for i in (-1, 4):
    with pytest.raises(IndexError, match=f"no sequence {i}; there are 4"):
      data.sequence(i)


def test_indexed_document_with_several_sequences(write_pair):
  prefix = write_pair(DOCUMENTS)
  raw = bytearray(Path(prefix + ".idx").read_bytes())
  raw[26:34] = struct.pack("<Q", 3)
  raw[34 + 12 * 4 :] = struct.pack("<3q", 0, 3, 4)
  Path(prefix + ".idx").write_bytes(raw)
  Path(prefix + ".crc32").unlink()  # as a pair of another program
  assert IndexedDataset(prefix).document_starts.tolist() == [0, 6]


def test_indexed_pickled_reader_maps_file_again(write_pair):
  data = IndexedDataset(write_pair([[1] * 100_000]))
  pickled = pickle.dumps(data)
  assert len(pickled) < 1000
  assert pickle.loads(pickled).tokens[:].tolist() == data.tokens[:].tolist()


def test_indexed_reader_is_read_only(write_pair):
  data = IndexedDataset(write_pair(DOCUMENTS))
  for view in (data.tokens[:], data.sizes, data.pointers, data.doc_index):
    with pytest.raises(ValueError, match="read-only"):
      view[0] = 1


def test_indexed_dtype_follows_vocabulary():
  names = {65_499: "uint16", 65_500: "int32", 50_277: "uint16", 1 << 20: "int32", 2: "uint16"}
  assert {size: dtype_for(size).name for size in names} == names


@pytest.mark.parametrize(
  ("document", "message"),
  [
    ([1, 65_536], r"document 1: token 1 has the id 65536, but ids must be in \[0, 65536\)"),
    ([-1], r"document 1: token 0 has the id -1"),
    ([[1, 2]], r"document 1 has shape \(1, 2\)"),
    ([1.0], "dtype float64; a vector of integer ids"),
    ([True], "dtype bool; a vector of integer ids"),
  ],
)
def test_indexed_invalid_document_named(tmp_path, write_pair, document, message):
  write_pair(DOCUMENTS)
  before = [sha256(tmp_path / name) for name in ("pair.bin", "pair.idx")]
  with (
    pytest.raises(DataError, match=message),
    IndexedWriter(tmp_path / "pair", "uint16") as writer,
  ):
    writer.add_document([1])
    writer.add_document(document)
  assert left_in(tmp_path) == ["pair.bin", "pair.crc32", "pair.idx"]
  assert before == [sha256(tmp_path / name) for name in ("pair.bin", "pair.idx")]


def test_indexed_writer_is_atomic(tmp_path):
  with pytest.raises(RuntimeError, match="stop"), IndexedWriter(tmp_path / "x", "uint16") as writer:
    writer.add_document([1, 2])
    assert not {"x.bin", "x.idx"} & set(left_in(tmp_path))
    raise RuntimeError("stop")
  assert left_in(tmp_path) == []


def test_indexed_writer_without_tokens_raises(tmp_path):
  with pytest.raises(DataError, match="no tokens were added"), IndexedWriter(tmp_path / "x", "u2"):
    pass
  assert left_in(tmp_path) == []


def test_indexed_replaced_pair_open_readers_keep_old(write_pair):
  prefix = write_pair(DOCUMENTS)
  old = IndexedDataset(prefix)
  write_pair([[9, 9]])
  assert IndexedDataset(prefix).tokens[:].tolist() == [9, 9]
  assert old.tokens[:].tolist() == list(itertools.chain(*DOCUMENTS))


def test_indexed_crash_while_renaming_leaves_no_mixed_pair(write_pair, monkeypatch):
  prefix = write_pair([[1, 2, 3, 4], [5, 6]])
  replace = os.replace

  def stop_at_the_index(source, target):
    if target.endswith(".idx"):
      raise OSError(28, "No space left on device")
    replace(source, target)

  monkeypatch.setattr(os, "replace", stop_at_the_index)
  with pytest.raises(DataError, match=r"cannot write .*No space left on device"):
    write_pair([[4, 5], [6, 7, 8, 9]])  # files of the same sizes
  with pytest.raises(DataError, match=r"pair.idx has other checksums than pair.crc32 says"):
    IndexedDataset(prefix)


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint32", "bool"])
def test_indexed_unsupported_dtype_rejected(tmp_path, dtype):
  with pytest.raises(DataError, match=f"not {dtype}; use dtype_for"):
    IndexedWriter(tmp_path / "x", dtype)


def test_indexed_unwritable_folder_named(tmp_path):
  (tmp_path / "file").write_text("")
  for folder in ("file", "absent"):
    with (
      pytest.raises(DataError, match=rf"cannot write .*{folder}/x.*use another folder"),
      IndexedWriter(tmp_path / folder / "x", "uint16"),
    ):
      pass


def test_indexed_pair_of_other_program_read_exactly(given):
  folder = given("binidx")
  expected = json.loads((folder / "expected.json").read_text())
  for name, wanted in expected["sets"].items():
    for end, file in wanted["files"].items():
      assert (folder / (name + end)).stat().st_size == file["bytes"]
      assert sha256(folder / (name + end)) == file["sha256"]
    data = IndexedDataset(folder / name)
    assert data.dtype.name == wanted["dtype"] == dtype_for(expected["vocab_size"]).name
    assert data.num_sequences == wanted["sequences"] == wanted["header"]["sequence_count"]
    assert data.num_documents == wanted["documents"]
    assert len(data.doc_index) == wanted["doc_idx_length"]
    assert data.doc_index[:8].tolist() == wanted["doc_idx_head"]
    assert data.doc_index[-3:].tolist() == wanted["doc_idx_tail"]
    assert data.num_tokens == wanted["total_tokens"] == wanted["sizes_sum"] == data.sizes.sum()
    assert data.sizes[:10].tolist() == wanted["sizes_head"]
    assert (data.sizes.min(), data.sizes.max()) == (wanted["min_size"], wanted["max_size"])
    assert data.pointers[:5].tolist() == wanted["pointers_head"]
    ends = [int(data.sequence(i)[-1]) for i in range(data.num_sequences)]
    assert (set(ends) == {wanted["eod_token"]}) == wanted["each_document_ends_with_eod"]
    for sample in wanted["samples"]:
      ids = data.sequence(sample["sequence"])
      assert len(ids) == sample["size"]
      assert data.pointers[sample["sequence"]] == sample["pointer"]
      assert ids[:20].tolist() == sample["first_20"]
      assert ids[-5:].tolist() == sample["last_5"]
      assert int(ids.astype(np.int64).sum()) == sample["crc_sum"]
    data.check_tokens(expected["vocab_size"])


def test_indexed_rewritten_documents_same_bytes(given, tmp_path):
  folder = given("binidx")
  for name, wanted in json.loads((folder / "expected.json").read_text())["sets"].items():
    data = IndexedDataset(folder / name)
    with IndexedWriter(tmp_path / name, data.dtype) as writer:
      for i in range(data.num_sequences):
        writer.add_document(data.sequence(i))
    assert sha256(tmp_path / (name + ".bin")) == wanted["files"][".bin"]["sha256"]
    assert sha256(tmp_path / (name + ".idx")) == wanted["files"][".idx"]["sha256"]
    assert writer.sha256 == wanted["files"][".bin"]["sha256"]

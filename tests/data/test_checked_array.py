"""Tokens are compared with the checksums of their file whenever they are read."""

import zlib

import numpy as np
import pytest

from train.data import DataError, IndexedDataset, IndexedWriter
from train.data.checked_array import BLOCK, Checksums
from train.data.windows import TokenWindows

IDS = np.random.default_rng(0).integers(0, 300, 3 * BLOCK // 2 + 5)  # three blocks and ten bytes


@pytest.fixture
def pair(tmp_path):
  with IndexedWriter(tmp_path / "pair", "uint16", weighted=True) as writer:
    for ids in np.split(IDS, [1, 7000, 20_000]):
      writer.add_document(ids, ids % 3)
  return tmp_path / "pair"


def flip(path, at):
  with path.open("r+b") as file:
    file.seek(at)
    byte = file.read(1)[0]
    file.seek(at)
    file.write(bytes([byte ^ 1]))


def test_checksums_are_those_of_blocks_however_they_are_written(pair):
  raw = pair.with_suffix(".bin").read_bytes()
  weights = pair.with_suffix(".weights").read_bytes()
  index = pair.with_suffix(".idx").read_bytes()
  files = raw, weights, index
  blocks = [part[i : i + BLOCK] for part in files for i in range(0, len(part), BLOCK)]
  assert np.fromfile(f"{pair}.crc32", "<u4").tolist() == [zlib.crc32(block) for block in blocks]
  empty = Checksums()
  empty.update(b"")
  assert len(empty.array()) == 0


@pytest.mark.parametrize("start", [0, 1, BLOCK // 2 - 1, BLOCK // 2, BLOCK, len(IDS) - 1])
def test_slices_are_those_of_the_file(pair, start):
  data = IndexedDataset(pair)
  for stop in (start, start + 1, start + BLOCK // 2, start + BLOCK + 1, None):
    assert data.tokens[start:stop].tolist() == IDS[start:stop].tolist()
    assert data.weights[start:stop].tolist() == (IDS[start:stop] % 3).tolist()
  assert np.asarray(data.tokens).tolist() == IDS.tolist() and len(data.tokens) == len(IDS)


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 9])
def test_any_changed_byte_is_seen_by_who_reads_its_block_only(pair, at):
  data = IndexedDataset(pair)  # open before the damage, as in a run
  flip(pair.with_suffix(".bin"), at)
  block = at // BLOCK
  for number, start in enumerate(range(0, len(IDS), BLOCK // 2)):
    if number != block:
      data.tokens[start : start + BLOCK // 2]
      continue
    with pytest.raises(DataError, match=rf"pair.bin, bytes {block * BLOCK} to .* pair.crc32"):
      data.tokens[start : start + 1]
  with pytest.raises(DataError, match=r"create both again with `lnssm-train tokenize --force`"):
    data.tokens[:]


def test_weights_are_compared_too(pair):
  data = IndexedDataset(pair)
  flip(pair.with_suffix(".weights"), 4 * len(IDS) - 1)
  data.weights[: BLOCK // 4]
  with pytest.raises(DataError, match=r"pair.weights, bytes"):
    data.weights[-1:]


def test_file_cut_in_use_is_an_error_of_the_reader(pair):
  """Mapped into memory, it ends the process."""
  windows = TokenWindows(pair, 4, 300)
  with pair.with_suffix(".bin").open("r+b") as file:
    file.truncate(BLOCK)
  windows[0]
  with pytest.raises(DataError, match=rf"pair.bin has {BLOCK} bytes, but had 49162"):
    windows[BLOCK // 4]


def test_checksums_of_other_files_rejected(pair):
  path = pair.with_suffix(".crc32")
  path.write_bytes(path.read_bytes()[:-8])
  with pytest.raises(DataError, match=r"pair.crc32: found .* it is of other token files"):
    IndexedDataset(pair)


def test_pair_without_checksums_is_read(pair):
  pair.with_suffix(".crc32").unlink()
  flip(pair.with_suffix(".bin"), 0)
  assert IndexedDataset(pair).tokens[:1].tolist() == [IDS[0] ^ 1]

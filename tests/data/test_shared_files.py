"""Several processes that create, replace and read the same token files."""

import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lnssm_jax.files import atomic
from train.data import indexed
from train.data.errors import DataError
from train.data.indexed import IndexedDataset, IndexedWriter
from train.data.windows import TokenWindows

# A process that creates token files again and again, and reads them.
CREATES = """
import fcntl, sys
from types import SimpleNamespace
folder, rounds, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if mode == "no locks":
  def flock(*_): raise OSError(37, "No locks available")
  fcntl.flock = flock
from train.data.indexed import IndexedDataset
from train.data.tokenize import prepare
print("ready", flush=True)
sys.stdin.readline()
for number in range(rounds):
  data = SimpleNamespace(
    folder=folder if mode == "force" else f"{folder}/{number}", tokenizer="bpe:260",
    end_of_text=None, train=("a",), validation=(), token_sets=("a",),
    sources={"a": f"{folder}/a.txt"}, fields={}, targets={},
  )
  (sidecar,) = prepare(data, force=mode == "force").values()
  pair = IndexedDataset(f"{data.folder}/a")
  assert len(pair.tokens[:]) == sidecar["tokens"] == pair.num_tokens
"""


@pytest.mark.parametrize(("mode", "rounds"), [("once", 25), ("force", 25), ("no locks", 10)])
def test_shared_files_several_processes_create_the_same(mode, rounds, tmp_path):
  (tmp_path / "a.txt").write_text("the slow quick river stone moves over the bright night. " * 60)
  arguments = [sys.executable, "-c", CREATES, str(tmp_path), str(rounds), mode]
  pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
  start = lambda: subprocess.Popen(arguments, text=True, cwd=Path(__file__).parents[2], **pipes)
  processes = [start() for _ in range(3)]
  for process in processes:
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
  for process in processes:
    process.stdin.write("\n")
    process.stdin.flush()
  errors = [process.communicate(timeout=120)[1] for process in processes]
  assert [process.returncode for process in processes] == [0, 0, 0], "".join(errors)
  folders = [tmp_path] if mode == "force" else [tmp_path / str(n) for n in range(rounds)]
  for folder in folders:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    expected = ["a.bin", "a.crc32", "a.idx", "a.json", "tokenizer.json"]
    assert [name for name in names if name != "a.txt"] == expected


def test_lock_of_a_killed_process_is_taken_and_removed(tmp_path):
  path, waited = tmp_path / "a", []
  code = f"""
from pathlib import Path
from lnssm_jax.files import atomic
held = atomic.locked(Path({str(path)!r}))
held.__enter__()
(Path({str(path)!r}).with_name("a.{"0" * 16}.partial")).touch()
print("locked", flush=True)
input()
"""
  process = subprocess.Popen(
    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  )
  assert process.stdout.readline() == "locked\n"

  def kill():
    waited.append(1)
    process.kill()

  with atomic.locked(path, kill):
    assert (tmp_path / ".a.lock").exists()
    atomic.remove_leftovers(path)
  assert waited == [1] and not list(tmp_path.iterdir())
  process.communicate()


def write(prefix, documents, **options):
  with IndexedWriter(prefix, np.uint16, **options) as writer:
    for ids in documents:
      weights = np.ones(len(ids)) if options else None
      writer.add_document(ids, weights)


OLD, NEW = [[1, 2, 3, 4], [5, 6]], [[7, 8], [9, 10, 11, 12]]  # of equal sizes of files


@pytest.mark.parametrize("weighted", [False, True])
def test_pair_being_replaced_has_all_files_and_no_mixture_is_read(weighted, tmp_path, monkeypatch):
  prefix, stage, replace = tmp_path / "pair", itertools.count(), os.replace
  options = {"weighted": True} if weighted else {}
  write(prefix, OLD, weighted=True)
  names = {path.name for path in tmp_path.iterdir()}

  def replace_and_keep(source, target):
    """As a crash after each step would leave the files."""
    kept = tmp_path / f"after-{next(stage)}"
    kept.mkdir()
    for path in tmp_path.glob("pair.*"):
      if path.suffix != ".partial":
        shutil.copy(path, kept)
    replace(source, target)

  monkeypatch.setattr(os, "replace", replace_and_keep)
  write(prefix, NEW, **options)
  monkeypatch.undo()
  first, *mixtures = sorted(tmp_path.glob("after-*"))
  assert len(mixtures) == 2 + weighted
  assert IndexedDataset(first / "pair").sequence(0).tolist() == OLD[0]
  for mixture in mixtures:
    assert {path.name for path in mixture.iterdir()} >= names - {"pair.weights"}
    with pytest.raises(DataError, match=r"checksum|it is of other token files"):
      pair = IndexedDataset(mixture / "pair")
      pair.tokens[:], pair.weights is None or pair.weights[:]
  assert IndexedDataset(prefix).sequence(0).tolist() == NEW[0]


def test_pair_being_renamed_is_not_taken_for_one_of_an_ended_process(tmp_path, monkeypatch):
  """By another writer of the same files, which removes what a killed one has left."""
  replace = os.replace

  def replace_after_another_writer(source, target):
    atomic.remove_leftovers(Path(target))
    replace(source, target)

  monkeypatch.setattr(os, "replace", replace_after_another_writer)
  write(tmp_path / "pair", OLD, weighted=True)
  assert IndexedDataset(tmp_path / "pair").sequence(0).tolist() == OLD[0]


def test_reader_waits_while_a_pair_is_being_replaced_but_not_for_damage(tmp_path, monkeypatch):
  prefix = tmp_path / "pair"
  write(prefix, OLD)
  index = (tmp_path / "pair.idx").read_bytes()
  (tmp_path / "pair.idx").write_bytes(b"damaged")
  partial = atomic.create(atomic.partial_name(tmp_path / "pair.idx"))
  pauses = []

  def sleep(seconds):
    pauses.append(seconds)
    if len(pauses) == 3:
      (tmp_path / "pair.idx").write_bytes(index)
      partial.close()

  monkeypatch.setattr(indexed.time, "sleep", sleep)
  assert IndexedDataset(prefix).num_documents == 2
  assert len(pauses) == 3
  (tmp_path / "pair.idx").write_bytes(b"damaged")
  begin = time.monotonic()
  with pytest.raises(DataError, match="not an index file"):
    IndexedDataset(prefix)
  assert time.monotonic() - begin < 1


def test_index_of_another_pair_of_equal_sizes_is_rejected(tmp_path):
  for name, documents in (("a", OLD), ("b", NEW)):
    write(tmp_path / name, documents)
  shutil.copy(tmp_path / "b.idx", tmp_path / "a.idx")
  with pytest.raises(DataError, match=r"a\.idx has other checksums than a\.crc32 says"):
    IndexedDataset(tmp_path / "a")
  checksums = tmp_path / "b.crc32"  # of an older version: without those of the index
  checksums.write_bytes(checksums.read_bytes()[:-4])
  assert IndexedDataset(tmp_path / "b").sequence(0).tolist() == NEW[0]


def test_documents_without_tokens_have_no_place_in_windows_of_whole_documents(tmp_path):
  write(tmp_path / "a", [[], [1, 2, 3], [], [4], [5, 6], []])
  for packed in (False, True):
    windows = TokenWindows(tmp_path / "a", 4, 16, whole=[True], packed=packed)
    read = [windows[i] for i in range(len(windows))]
    targets = sorted(int(t) for w in read for t in w["targets"][w["weights"] > 0])
    assert targets == [2, 3, 6]
  write(tmp_path / "b", [[], [4], []])
  with pytest.raises(DataError, match="has no row of two tokens"):
    TokenWindows(tmp_path / "b", 4, 16, whole=[True])


def test_row_of_two_documents_with_one_without_tokens_is_named(tmp_path):
  """Its log-probability would be 0, more than that of any other."""
  write(tmp_path / "a", [[1, 2], [3, 4], [5, 6], []])
  for packed in (False, True):
    with pytest.raises(DataError, match=r"a\.bin: row 2 has an answer without tokens \(1 in all\)"):
      TokenWindows(tmp_path / "a", 4, 16, whole=[2], packed=packed)

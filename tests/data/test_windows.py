"""Windows and batches: one stream for any reader, each window once, no target across documents."""

import hashlib
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from train.data import DataError, packing
from train.data.windows import TokenWindows, eval_batches, train_batches

KEYS = {"tokens": "int32", "targets": "int32", "segment_ids": "int32", "weights": "float32"}


def documents(rng, count, longest=20, vocab_size=1000):
  """Distinct documents of 1 to `longest` tokens."""
  return [rng.integers(1, vocab_size, rng.integers(1, longest + 1)) for _ in range(count)]


@pytest.fixture
def source(write_pair):
  rng = np.random.default_rng(0)
  prefixes = [write_pair(documents(rng, count), f"set{count}") for count in (30, 7, 61)]
  return TokenWindows(prefixes, seq_len=8, vocab_size=1000)


def take(batches, count):
  with batches:
    return [next(batches) for _ in range(count)]


def digest(batches):
  """SHA-256 of a stream of batches: keys, shapes, dtypes and values."""
  total = hashlib.sha256()
  for batch in batches:
    for key in sorted(batch):
      array = batch[key]
      total.update(f"{key} {array.shape} {array.dtype.str}".encode() + array.tobytes())
  return total.hexdigest()


def windows_in(batches):
  """Rows of the batches, as bytes."""
  return [row.tobytes() for batch in batches for row in batch["tokens"]]


def test_window_entries_match_definition(write_pair):
  prefix = write_pair([[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]])
  source = TokenWindows(prefix, seq_len=5, vocab_size=12)
  assert len(source) == 2
  first, second = source[0], source[1]
  assert first["tokens"].tolist() == [1, 2, 3, 4, 5]
  assert first["targets"].tolist() == [2, 3, 4, 5, 6]
  assert first["segment_ids"].tolist() == [0, 0, 0, 1, 2]
  assert first["weights"].tolist() == [1, 1, 0, 0, 1]
  assert second["tokens"].tolist() == [6, 7, 8, 9, 10]
  assert second["targets"].tolist() == [7, 8, 9, 10, 11]
  assert second["segment_ids"].tolist() == [0, 0, 0, 0, 1]
  assert second["weights"].tolist() == [1, 1, 1, 0, 1]
  assert {key: value.dtype.name for key, value in first.items()} == KEYS


def test_fingerprint_of_windows_is_of_tokens_documents_and_length(write_pair):
  print_of = lambda name, rows, T=2: TokenWindows(write_pair(rows, name), T, 12).fingerprint
  usual = print_of("a", [[1, 2, 3], [4, 5, 6]])
  assert print_of("b", [[1, 2, 3], [4, 5, 6]]) == usual
  others = [print_of("c", [[1, 2], [3, 4, 5, 6]]), print_of("d", [[1, 2, 3], [4, 5, 7]])]
  others.append(print_of("e", [[1, 2, 3], [4, 5, 6]], 1))
  assert len({usual, *others}) == 4


@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 8, 50])
@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_windows_cover_documents_in_order(write_pair, seq_len, dtype):
  texts = documents(np.random.default_rng(seq_len), 12)
  source = TokenWindows(write_pair(texts, dtype=dtype), seq_len, vocab_size=1000)
  flat = np.concatenate(texts)
  owner = np.repeat(np.arange(len(texts)), [len(ids) for ids in texts])
  assert len(source) == (len(flat) - 1) // seq_len
  for i in range(len(source)):
    here = slice(i * seq_len, (i + 1) * seq_len)
    after = slice(here.start + 1, here.stop + 1)
    window = source[i]
    np.testing.assert_array_equal(window["tokens"], flat[here])
    np.testing.assert_array_equal(window["targets"], flat[after])
    np.testing.assert_array_equal(window["segment_ids"], owner[here] - owner[here.start])
    np.testing.assert_array_equal(window["weights"], owner[here] == owner[after])


def test_windows_empty_and_multi_sequence_documents(write_pair):
  source = TokenWindows(write_pair([[1, 2], [], [], [3, 4, 5]]), seq_len=4, vocab_size=6)
  assert source[0]["tokens"].tolist() == [1, 2, 3, 4]
  segments = source[0]["segment_ids"].tolist()
  assert segments[0] == segments[1] != segments[2] == segments[3]
  assert source[0]["weights"].tolist() == [1, 0, 1, 1]


def test_windows_several_datasets_concatenated(write_pair):
  prefixes = [write_pair([[k] * n], str(k)) for k, n in ((1, 9), (2, 5), (3, 14))]
  source = TokenWindows(prefixes, seq_len=4, vocab_size=4)
  assert [source[i]["tokens"].tolist() for i in range(len(source))] == [
    [k] * 4 for k in (1, 1, 2, 3, 3, 3)
  ]
  assert all((source[i]["weights"] == 1).all() for i in range(len(source)))
  for i in (-1, 6):
    with pytest.raises(IndexError, match=f"no window {i}; there are 6"):
      source[i]


def test_windows_pickled_source_reads_same(source):
  pickled = pickle.dumps(source)
  assert len(pickled) < 20_000
  copy = pickle.loads(pickled)
  assert repr(copy) == repr(source) and "seq_len=8" in repr(source)
  assert digest(eval_batches(copy, 4)) == digest(eval_batches(source, 4))


def test_batches_shape_and_dtype(source):
  for batch in take(train_batches(source, seed=0, global_batch=5), 3):
    assert {key: value.dtype.name for key, value in batch.items()} == KEYS
    assert {value.shape for value in batch.values()} == {(5, 8)}


@pytest.mark.parametrize("global_batch", [1, 5, 7, 200])
def test_batches_epoch_is_new_permutation(source, global_batch):
  n = len(source)
  assert n % 5 and n % 7  # so that batches span epochs
  steps = -(-3 * n // global_batch)
  rows = windows_in(take(train_batches(source, seed=1, global_batch=global_batch), steps))
  epochs = [rows[e * n : (e + 1) * n] for e in range(3)]
  everything = sorted(source[i]["tokens"].tobytes() for i in range(n))
  assert len(set(everything)) == n
  assert [sorted(epoch) for epoch in epochs] == [everything] * 3
  assert len({tuple(epoch) for epoch in epochs}) == 3
  assert epochs[0] != [source[i]["tokens"].tobytes() for i in range(n)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_batches_with_fewer_windows_than_rows(write_pair, count):
  source = TokenWindows(write_pair([np.arange(count + 1)]), seq_len=1, vocab_size=5)
  rows = take(train_batches(source, seed=0, global_batch=2), 3 * count)
  found = np.concatenate([batch["tokens"][:, 0] for batch in rows]).reshape(-1, count)
  assert (np.sort(found) == np.arange(count)).all()


def test_batches_stream_unchanged_since_first_version(write_pair):
  # Pinned: a change here, ours or Grain's, means that runs no longer resume where they stopped.
  source = TokenWindows(write_pair([np.arange(500) % 90, np.arange(300) % 80]), 10, 90)
  found = digest(take(train_batches(source, seed=0, global_batch=6), 40))
  assert found == "fcbee4f3f6bbd00cf073742892ee4659b47c79370ed6eb5e33e4155349465d7a"


def test_batches_independent_of_threads_and_prefetch(source):
  options = [(0, 0), (1, 1), (2, 8), (8, 16)]
  steps = 3 * len(source) // 4
  streams = {
    digest(take(train_batches(source, seed=3, global_batch=4, threads=t, prefetch=p), steps))
    for t, p in options
  }
  assert len(streams) == 1


def test_batches_seed_changes_order(source):
  streams = {}
  for seed in (0, 1, 2, 2**31, 2**32 - 1):
    batches = take(train_batches(source, seed=seed, global_batch=4), 3 * len(source) // 4)
    streams[seed] = windows_in(batches)
  n = len(source)
  epochs = [tuple(rows[e * n : (e + 1) * n]) for rows in streams.values() for e in range(2)]
  assert len(set(epochs)) == len(epochs)  # adjacent seeds share no epoch


@pytest.mark.parametrize("processes", [2, 3, 6])
def test_batches_rows_of_processes_are_those_of_one(source, processes):
  whole = take(train_batches(source, seed=5, global_batch=6), 9)
  size = 6 // processes
  parts = [
    take(train_batches(source, seed=5, global_batch=6, rows=range(first, first + size)), 9)
    for first in range(0, 6, size)
  ]
  for batch, *pieces in zip(whole, *parts, strict=True):
    for key, value in batch.items():
      np.testing.assert_array_equal(np.concatenate([piece[key] for piece in pieces]), value)


def test_batches_from_any_step_continue_exactly(source):
  steps = 2 * len(source) // 4 + 3
  whole = take(train_batches(source, seed=5, global_batch=4), steps)
  rng = np.random.default_rng(0)
  for start in [0, 1, steps - 1, *rng.integers(0, steps, 12).tolist()]:
    with train_batches(source, seed=5, global_batch=4, start=start, threads=start % 3) as batches:
      assert batches.step == start
      rest = [next(batches) for _ in range(steps - start)]
      assert batches.step == steps
    assert digest(rest) == digest(whole[start:])


def test_batches_many_restarts_same_stream(source):
  whole = take(train_batches(source, seed=5, global_batch=3), 60)
  rng, step, parts = np.random.default_rng(1), 0, []
  while step < 60:
    with train_batches(source, seed=5, global_batch=3, start=step) as batches:
      parts += [next(batches) for _ in range(min(int(rng.integers(0, 9)), 60 - step))]
      step = batches.step
  assert digest(parts) == digest(whole)


def test_batches_far_start_is_immediate(source):
  begin = time.perf_counter()
  (batch,) = take(train_batches(source, seed=0, global_batch=4, start=10**12), 1)
  assert batch["tokens"].shape == (4, 8)
  assert time.perf_counter() - begin < 5.0


def test_batches_close_ends_threads(source):
  before = threading.active_count()
  batches = train_batches(source, seed=0, global_batch=4, threads=4)
  next(batches)
  assert threading.active_count() > before
  batches.close()
  batches.close()
  deadline = time.monotonic() + 10
  while threading.active_count() > before and time.monotonic() < deadline:
    time.sleep(0.01)
  assert threading.active_count() == before
  with pytest.raises(ValueError, match="closed iterator"):
    next(batches)


def test_batches_without_close_exit_quietly(source):
  code = (
    "import sys; from train.data.windows import TokenWindows, train_batches;"
    "b = train_batches(TokenWindows(sys.argv[1:], 8, 1000), seed=0, global_batch=4); next(b)"
  )
  prefixes = [dataset.prefix for dataset in source._datasets]
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", code, *prefixes],
    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    capture_output=True,
    timeout=120,
  )
  assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("batch", [1, 4, 1000])
def test_eval_batches_every_window_once_in_order(source, batch):
  batches = list(eval_batches(source, batch))
  assert len(batches) == -(-len(source) // batch)
  assert all(value.shape == (batch, 8) for b in batches for value in b.values())
  assert all({key: b[key].dtype.name for key in b} == KEYS for b in batches)
  joined = {key: np.concatenate([b[key] for b in batches]) for key in KEYS}
  for i in range(len(source)):
    for key, value in source[i].items():
      np.testing.assert_array_equal(joined[key][i], value)
  assert not joined["weights"][len(source) :].any()
  assert not joined["tokens"][len(source) :].any()


def test_eval_batches_of_the_first_rows_and_of_a_process(source):
  """Six rows in batches of four: two of the second batch count, and are those of process 0."""
  whole = list(eval_batches(source, 4, count=6))
  assert [batch["weights"].any(axis=1).tolist() for batch in whole] == [
    [True] * 4,
    [True, True, False, False],
  ]
  shards = [eval_batches(source, 4, range(first, first + 2), 6) for first in (0, 2)]
  for batch, *pieces in zip(whole, *shards, strict=True):
    for key, value in batch.items():
      np.testing.assert_array_equal(np.concatenate([piece[key] for piece in pieces]), value)
  for i in range(6):
    np.testing.assert_array_equal(whole[i // 4]["tokens"][i % 4], source[i]["tokens"])
  assert len(list(eval_batches(source, 4, count=10**6))) == -(-len(source) // 4)


def test_windows_id_outside_vocabulary_named_on_open(write_pair):
  prefix = write_pair([[1, 2, 300, 4], [5, 301]])
  TokenWindows(prefix, 2, 302)
  with pytest.raises(DataError, match=r"pair.bin: token 5 has the id 301, .* \[0, 301\).*model.vo"):
    TokenWindows(prefix, 2, 301)


def test_windows_ids_checked_on_read(write_pair):
  prefix = write_pair([[1, 2, 3, 4, 5, 6]])
  source = TokenWindows(prefix, 2, 10)
  with open(prefix + ".bin", "r+b") as file:
    file.seek(2 * 3)
    file.write(b"\x63\x00")
  with pytest.raises(DataError, match=r"pair.bin, bytes 0 to 16384, have another checksum"):
    source[0]
  Path(prefix + ".crc32").unlink()  # as a pair of another program
  source = TokenWindows(prefix, 2, 100)
  source.vocab_size = 10
  source[0]
  with pytest.raises(DataError, match=r"pair.bin: token 3 has the id 99, but ids must be"):
    source[1]
  with (
    train_batches(source, seed=0, global_batch=4) as batches,
    pytest.raises(DataError, match="token 3 has the id 99"),
  ):
    next(batches)


@pytest.mark.parametrize(("tokens", "fits"), [(8, 7), (1, 1), (2, 1)])
def test_windows_seq_len_beyond_data_named(write_pair, tokens, fits):
  long = write_pair([[1] * 100], "long")
  prefix = write_pair([[1] * tokens])
  with pytest.raises(DataError, match=rf"has {tokens} tokens, .* needs 9; use seq_len={fits} or"):
    TokenWindows([long, prefix], 8, 10)
  if tokens > 1:
    assert len(TokenWindows([long, prefix], fits, 10)) >= 1


def test_windows_invalid_arguments_named(source, write_pair):
  with pytest.raises(DataError, match="no token files are named"):
    TokenWindows([], 8, 10)
  with pytest.raises(DataError, match="seq_len=0 must be at least 1"):
    TokenWindows(write_pair([[1, 2]]), 0, 10)
  with pytest.raises(DataError, match="global_batch=0 must be at least 1"):
    train_batches(source, seed=0, global_batch=0)
  with pytest.raises(DataError, match="start=-1 must be at least 0"):
    train_batches(source, seed=0, global_batch=1, start=-1)
  with pytest.raises(DataError, match="batch=0 must be at least 1"):
    next(eval_batches(source, 0))
  with pytest.raises(DataError, match=r"absent.idx does not exist"):
    TokenWindows("absent", 8, 10)


def test_best_fit_takes_the_largest_first_and_the_fullest_window():
  assert packing.best_fit([2, 5, 3, 4, 1], room=6) == [[1, 4], [3, 0], [2]]

"""`train.data.streams`: windows of text that is encoded while it is read, resumed anywhere."""

import contextlib
import itertools
import json
import sys
import threading
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from train.cli.errors import exit_code
from train.data import streams
from train.data.encoding import encode
from train.data.errors import DataError
from train.data.indexed import IndexedWriter
from train.data.streams import Stream, StreamBatches
from train.data.tokenizers import load_tokenizer
from train.data.windows import TokenWindows

BYTES = load_tokenizer("bytes")
TEXTS = [f"document {number}. " * (number % 4) for number in range(200)]
KEPT = [text for text in TEXTS if text]
ROWS = [{"id": number, "body": text} for number, text in enumerate(TEXTS)]


class Skipping:
  """As a `datasets.IterableDataset`."""

  def __init__(self, rows=TEXTS):
    self.rows = rows

  def __iter__(self):
    return iter(self.rows)

  def skip(self, count):
    asked.append(count)
    return Skipping(self.rows[count:])


def start(start=0):
  asked.append(start)
  return iter(TEXTS[start:])


def failing(error):
  """A generator of a text, which then raises."""
  yield "a"
  raise error


class Unsized(list):
  """As datasets with rows by number that do not know how many."""

  def __len__(self):
    raise TypeError("no len()")


def waiting():
  yield "ab" * 120  # a batch
  gate.wait(60)


gate = threading.Event()
once = iter(["a", "b"])
asked = []
MODULE = {
  "texts": lambda: (text for text in TEXTS),
  "rows": lambda: iter(ROWS),
  "start": start,
  "skipping": Skipping,
  "dataset": lambda: ROWS * 20,  # Grain is slow to shuffle few
  "none": lambda: iter([""]),
  "empty": list,
  "number": lambda: 3,
  "numbers": lambda: iter(["a", {"text": 3}]),
  "keys": lambda: iter([{1: "a", "b": 2}]),
  "text": lambda: "a text, not a list of texts",
  "splits": lambda: {"train": TEXTS},
  "a_set": lambda: {"a", "b"},
  "unsized": lambda: Unsized(TEXTS),
  "raises": lambda: failing(KeyError("url")),
  "exits": lambda: failing(SystemExit(3)),
  "offline": lambda: failing(ConnectionResetError("reset by peer")),
  "raises_at_once": lambda: {}["HF_HOME"],
  "empties": lambda: itertools.chain(["a"], itertools.repeat("")),
  "once": lambda: once,
  "waiting": waiting,
}


@pytest.fixture(autouse=True)
def module(monkeypatch):
  monkeypatch.setattr(streams, "_MOST_EMPTY", 1000)
  monkeypatch.setitem(sys.modules, "documents_of_a_test", types.SimpleNamespace(**MODULE))
  asked.clear()


def source(name, folder):
  """A source of TEXTS, or of ROWS."""
  if name == "jsonl":
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(folder / "a.jsonl")
  if name == "parquet":
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    return str(folder / "a.parquet")
  return f"documents_of_a_test:{name}"


def batches(stream, count, state=None, **options):
  """(batches, the position after each)."""
  with contextlib.closing(StreamBatches(stream, 4, state=state, **options)) as read:
    return zip(*((next(read), read.state) for _ in range(count)), strict=True)


def same(a, b):
  return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
  "name", ["texts", "rows", "start", "skipping", "dataset", "jsonl", "parquet"]
)
def test_stream_continues_anywhere_as_if_it_had_not_stopped(name, tmp_path):
  """Over the end of an epoch, and wherever a batch ends in a document."""
  stream = Stream(source(name, tmp_path), BYTES, 60, 257, key="body", seed=1)
  whole, states = batches(stream, 20)
  for at in (3, 12, 16):
    again, _ = batches(stream, 20 - at, json.loads(json.dumps(states[at - 1])))
    assert all(same(a, b) for a, b in zip(again, whole[at:], strict=True))
  assert any(state["token"] for state in states)
  assert states[-1]["epoch"] > 0 or name == "dataset"  # which has no end
  assert name not in ("start", "skipping") or 0 < states[15]["document"] in asked


@pytest.mark.parametrize("boundaries", ["reset", "ignore"])
def test_windows_of_a_stream_are_those_of_token_files(tmp_path, boundaries):
  """Of one epoch; the next begins where the last document ends. The third begins with a window."""
  with IndexedWriter(tmp_path / "a", np.uint16) as writer:
    for text in KEPT:
      writer.add_document([*text.encode(), 256])
  files = TokenWindows(tmp_path / "a", 38, 257, boundaries)
  found, _ = batches(
    Stream("documents_of_a_test:texts", BYTES, 38, 257, boundaries), len(files) // 4
  )
  for number in range(len(found) * 4):
    row = {name: x[number % 4] for name, x in found[number // 4].items()}
    assert same(row, files[number])


def test_dataset_is_read_in_another_order_in_each_epoch():
  stream = Stream("documents_of_a_test:dataset", BYTES, 60, 257, key="body", seed=1)
  read, ids = stream.tokens(0, 0), []
  want = sorted([*text.encode(), 256] for text in KEPT * 20)
  while len(ids) < 2 * len(want):
    ids.append(next(read)[2].tolist())
  first, second = ids[: len(want)], ids[len(want) :]
  assert sorted(first) == sorted(second) == want and first != second
  other = Stream("documents_of_a_test:dataset", BYTES, 60, 257, key="body", seed=2).tokens(0, 0)
  assert [next(other)[2].tolist() for _ in first] != first


def test_stream_encodes_special_tokens_as_it_is_told_and_checks_ids(monkeypatch):
  asked = []

  def told(documents, tokenizer, special_tokens):
    asked.append(special_tokens)
    return encode(documents, tokenizer, special_tokens)

  monkeypatch.setattr(streams, "encode", told)
  options = {"special_tokens": "parse"}
  next(Stream("documents_of_a_test:texts", BYTES, 60, 257, **options).tokens(0, 0))
  assert asked == ["parse"]
  with pytest.raises(DataError, match=r"document 1: token 0 has the id 100, but .* \[0, 100\)"):
    batches(Stream("documents_of_a_test:texts", BYTES, 60, 100), 1)


def test_process_keeps_its_rows_of_each_batch():
  stream = Stream("documents_of_a_test:texts", BYTES, 60, 257)
  (whole, states), (part, own) = batches(stream, 3), batches(stream, 3, rows=range(2, 4))
  assert all(
    same(b, {key: x[2:] for key, x in a.items()}) for a, b in zip(whole, part, strict=True)
  )
  assert states == own


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("none", "has no text"),
    ("empty", "has no documents"),
    ("number", "returns int, which has no documents; return a generator"),
    ("missing", "cannot be used: .* has no attribute 'missing'"),
    ("numbers", r'document 1: "text" is int, expected a string'),
    ("keys", r"document 0: found the keys \['1', 'b'\], expected an object with the key"),
    ("text", "returns str, which has no documents; return a generator"),
    ("splits", "returns dict, which has no documents"),
    ("a_set", "returns set, which has no documents"),
    ("raises", r"document 1: the function raised: KeyError: 'url' \(test_streams.py, line \d+\)"),
    ("exits", "document 1: the function raised: SystemExit: 3"),
    ("offline", "document 1: the function raised: ConnectionResetError: reset by peer"),
    ("raises_at_once", "cannot be used: KeyError: 'HF_HOME'"),
    ("empties", "1,000 documents from 0 on are empty; leave them out"),
    ("once", r"no text when it is read again \(epoch 1\); return a new iterable in each call"),
  ],
)
def test_source_that_cannot_be_read_is_named(name, message):
  with pytest.raises(DataError, match=message) as found:
    batches(Stream(f"documents_of_a_test:{name}", BYTES, 60, 257), 1)
  assert exit_code(found.value) == (1 if name == "offline" else 2)


def test_dataset_that_does_not_know_its_length_is_read_in_order():
  found, _ = batches(Stream("documents_of_a_test:unsized", BYTES, 60, 257), 2)
  wanted, _ = batches(Stream("documents_of_a_test:texts", BYTES, 60, 257), 2)
  assert all(map(same, found, wanted))


def test_run_that_ends_does_not_wait_for_its_source(monkeypatch):
  monkeypatch.setattr(streams, "_GROUP", 1)
  stopped = []
  stream = Stream("documents_of_a_test:waiting", BYTES, 60, 257)
  with contextlib.closing(StreamBatches(stream, 4, stop=lambda: stopped)) as read:
    next(read)
    before = read.state
    threading.Timer(0.05, stopped.append, [True]).start()
    assert next(read, None) is None and read.state == before
  gate.set()

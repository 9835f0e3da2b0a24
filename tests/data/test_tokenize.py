"""Tokenizing: written files, streaming, progress and errors."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.data import (
  DataError,
  IndexedDataset,
  IndexedWriter,
  encoding,
  load_tokenizer,
  parts,
  prepare,
  progress,
  read_sidecar,
  sources,
  tokenize,
  tokenize_to,
)
from train.data.labels import Rows

ENDS = (".bin", ".crc32", ".idx", ".json")


@pytest.mark.parametrize("spec", ["bytes", "bpe:260"])
def test_tokenize_round_trip_and_sidecar_counts(corpus, spec):
  data = corpus.settings(spec)
  sidecars = prepare(data)
  tokenizer = load_tokenizer(spec, data.folder)
  for name, texts in corpus.texts.items():
    kept = [text for text in texts if text]
    assert corpus.texts_in(data.folder, name, tokenizer) == kept
    sidecar = sidecars[name]
    assert sidecar == read_sidecar(f"{data.folder}/{name}")
    assert sidecar["documents"] == len(kept)
    assert sidecar["tokens"] == IndexedDataset(f"{data.folder}/{name}").num_tokens
    assert sidecar["bytes"] == sum(len(text.encode()) for text in kept)
    assert sidecar["vocab_size"] == tokenizer.vocab_size
    assert sidecar["tokenizer"] == spec
    assert sidecar["tokenizer_fingerprint"] == tokenizer.fingerprint
    assert sidecar["source"] == [data.sources[name]]
    assert sidecar["skipped"] == ({"empty": 1} if name == "a" else {})
  names = {name + end for name in corpus.texts for end in ENDS}
  assert set(os.listdir(data.folder)) == names | ({"tokenizer.json"} if spec != "bytes" else set())


def test_tokenize_dtype_follows_vocabulary(corpus, tmp_path):
  class Large:
    spec = fingerprint = "large"
    vocab_size, end_of_text = 100_000, 99_999
    encode_batch = load_tokenizer("bytes").encode_batch
    pieces = load_tokenizer("bytes").pieces

  tokenize_to(tmp_path / "x", [str(corpus.raw / "b.jsonl")], Large())
  pair = IndexedDataset(tmp_path / "x")
  assert pair.dtype.name == "int32" and pair.sequence(0)[-1] == 99_999


def test_tokenize_several_inputs_in_order(corpus, tmp_path):
  tokenizer = load_tokenizer("bytes")
  inputs = [str(corpus.raw / "b.jsonl"), str(corpus.raw / "a.jsonl")]
  sidecar = tokenize_to(tmp_path / "new" / "folder" / "x", inputs, tokenizer)
  data = corpus.settings(folder=str(tmp_path / "new" / "folder"))
  assert corpus.texts_in(data.folder, "x", tokenizer) == [
    "other text",
    "more",
    "one",
    "two\n",
    "caf\u00e9",
  ]
  assert sidecar["documents"] == 5


@pytest.mark.slow
def test_tokenize_files_independent_of_batches_and_threads(corpus, tmp_path, monkeypatch):
  corpus.write("a", [f"document {i}\n" * (i % 7 * 20) for i in range(200)])
  expected = None
  for batch, piece in ((1 << 21, 1 << 14), (1, 30), (1000, 100), (10**9, 10**9)):
    monkeypatch.setattr(encoding, "BATCH", batch)
    monkeypatch.setattr("lnssm_jax.pretrained.tokenizers.PIECE", piece)
    data = corpus.settings("bpe:270")
    prepare(data, force=True)
    found = corpus.contents(data.folder)
    expected = expected or found
    assert found == expected
  code = (
    "import sys, json; from train.config import Data; from train.data import prepare;"
    "v = json.loads(sys.argv[1]); prepare(Data(**v), workers=int(sys.argv[2]), force=True)"
  )
  for workers in ("1", "3"):
    values = {name: getattr(data, name) for name in ("tokenizer", "train", "validation", "sources")}
    folder = tmp_path / f"workers{workers}"
    argument = json.dumps(values | {"folder": str(folder)})
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
      [sys.executable, "-W", "error", "-c", code, argument, workers], env=env, check=True
    )
    assert corpus.contents(folder) == expected


def test_tokenize_read_ahead_bounded(tmp_path, monkeypatch):
  read = written = furthest = 0

  def documents(files, skipped, *_):
    nonlocal read
    for _ in range(500):
      read += 1
      yield sources.Document("x" * 10)

  class Writer(IndexedWriter):
    def add_document(self, ids, weights=None):
      nonlocal written, furthest
      furthest = max(furthest, read - written)
      written += 1
      super().add_document(ids, weights)

  monkeypatch.setattr(encoding, "BATCH", 50)  # characters: five documents
  monkeypatch.setattr(sources, "read_inputs", documents)
  monkeypatch.setattr(tokenize, "IndexedWriter", Writer)
  (tmp_path / "a.txt").write_text("x")
  tokenize_to(tmp_path / "x", [str(tmp_path / "a.txt")], load_tokenizer("bytes"))
  assert written == 500
  assert furthest <= 5 * (encoding.AHEAD + 1)


def test_tokenize_empty_text_named(corpus):
  corpus.write("a", ["", ""])
  message = r"a.jsonl' has no text: 1 files, \{'empty': 2\} documents skipped"
  with pytest.raises(DataError, match=message):
    prepare(corpus.settings())
  assert os.listdir(corpus.settings().folder) == []


def test_tokenize_error_leaves_old_files(corpus):
  data = corpus.settings()
  prepare(data)
  before = corpus.contents(data.folder)
  with open(corpus.raw / "a.jsonl", "a") as file:
    file.write("{broken\n")
  with pytest.raises(DataError, match=r"a.jsonl, line 5: not JSON"):
    prepare(data)
  assert corpus.contents(data.folder) == before


def test_tokenize_crash_before_sidecar_leaves_none(corpus, monkeypatch):
  def stop(*_):
    raise KeyboardInterrupt

  data = corpus.settings()
  prepare(data)
  corpus.write("a", ["changed"])
  with monkeypatch.context() as patch:
    patch.setattr(tokenize, "write_sidecar", stop)
    with pytest.raises(KeyboardInterrupt):
      prepare(data)
  assert read_sidecar(f"{data.folder}/a") is None
  assert prepare(data)["a"] == read_sidecar(f"{data.folder}/a") is not None


@pytest.mark.parametrize("targets", [None, "last"])
def test_tokenize_killed_continues_after_the_complete_parts(corpus, tmp_path, monkeypatch, targets):
  """Killed twice; the files are those of a process that was not, and nothing is encoded twice."""
  monkeypatch.setattr(parts, "TOKENS", 100)
  monkeypatch.setattr(encoding, "BATCH", 10)
  texts = ["", *(f"document {i} " * (i % 5 + 1) for i in range(60))]
  source = tmp_path / "a.jsonl"
  source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
  rows, tokenizer = Rows(targets=targets), load_tokenizer("bytes")
  expected = tokenize_to(tmp_path / "whole" / "a", [str(source)], tokenizer, rows=rows)
  encoded = []

  class Killed(BaseException):
    pass

  def encode(documents, *arguments):
    for number, entry in enumerate(encoding.encode(documents, *arguments)):
      if number == 25:
        raise Killed
      encoded.append(len(entry[0]))
      yield entry

  monkeypatch.setattr(tokenize, "encode", encode)
  folder = tmp_path / "killed"
  for done in (25, 50):
    with pytest.raises(Killed):
      tokenize_to(folder / "a", [str(source)], tokenizer, rows=rows)
    assert [path.suffix for path in folder.iterdir()] == [".parts"]
    assert done - 5 < len(encoded) <= done
  assert tokenize_to(folder / "a", [str(source)], tokenizer, rows=rows) == expected
  assert 60 <= len(encoded) <= 60 + 2 * 6  # those of two parts that were not complete
  assert corpus.contents(folder) == corpus.contents(tmp_path / "whole")
  assert expected["skipped"] == {"empty": 1}


def test_tokenize_parts_of_other_text_not_used(corpus, tmp_path, monkeypatch):
  monkeypatch.setattr(parts, "TOKENS", 1)
  data = corpus.settings()
  with monkeypatch.context() as patch, pytest.raises(DataError):
    patch.setattr(tokenize, "write_sidecar", lambda *_: (_ for _ in ()).throw(DataError("full")))
    prepare(data)
  assert list(Path(data.folder).glob(".b.*.parts"))
  corpus.write("b", ["changed"])
  prepare(data)
  assert corpus.texts_in(data.folder, "b", load_tokenizer("bytes")) == ["changed"]
  assert not list(Path(data.folder).glob(".*.parts"))


def test_tokenize_full_disk_named_and_leaves_nothing(corpus, monkeypatch):
  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "replace", full)
  with pytest.raises(DataError, match=r"cannot write .*No space left on device\. Free disk space"):
    prepare(corpus.settings())
  assert os.listdir(corpus.settings().folder) == []


@pytest.mark.parametrize("text", ["[1]", "{}", '{"tokens": 0, "bytes": 1}', '{"tokens": "9"}', "{"])
def test_sidecar_damaged_named(tmp_path, text):
  (tmp_path / "a.json").write_text(text)
  with pytest.raises(DataError, match=r"a.json .*Delete it and prepare the data again"):
    read_sidecar(tmp_path / "a")
  assert read_sidecar(tmp_path / "b") is None


@pytest.mark.parametrize("workers", [0, -1, 1025, 10**12])
def test_tokenize_workers_out_of_bounds_rejected(corpus, workers):
  with pytest.raises(DataError, match=f"workers={workers} must be 1 to 1024"):
    prepare(corpus.settings(), workers=workers)


def test_tokenize_progress_shown_on_request(corpus, capsys):
  prepare(corpus.settings("bpe:260"))
  assert capsys.readouterr() == ("", "")
  prepare(corpus.settings("bpe:260"), progress=True)
  assert capsys.readouterr() == ("", "")  # nothing to do, no output
  prepare(corpus.settings("bpe:260"), progress=True, force=True)
  out, err = capsys.readouterr()
  lines = [line.split(",")[0] for line in err.splitlines()]
  assert out == ""
  assert lines == [
    "train bpe:260: 3 documents",
    "tokenize b: 2 documents",  # the shorter text first
    "tokenize a: 3 documents",
  ]
  assert "0.0 MB" in err and "MB/s" in err and "1 empty skipped" in err


def test_tokenize_progress_terminal_and_log(monkeypatch):
  for live, shown, lines in ((True, 51, 1), (False, 2, 2)):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda clock=clock: clock[0])
    out = io.StringIO()
    out.isatty = lambda live=live: live
    report = progress.Progress("t", out)
    for _ in range(100):
      clock[0] += 0.125
      report.add(1_000_000)
    report.close()
    assert out.getvalue().count("documents") == shown
    assert out.getvalue().count("\n") == lines
    assert out.getvalue().endswith("t: 100 documents, 100.0 MB, 8.0 MB/s\n")


def test_tokenize_does_not_import_jax():
  code = "import sys, train.data; sys.exit(bool({'jax', 'grain', 'flax'} & set(sys.modules)))"
  env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
  subprocess.run([sys.executable, "-c", code], env=env, check=True)


def test_tokenize_real_rows_with_neox_tokenizer(given, tmp_path):
  tokenizer = load_tokenizer(str(given("tokenizers/20B_tokenizer.json")))
  source = str(given("lm/val_openwebtext.jsonl.xz"))
  sidecar = tokenize_to(tmp_path / "web", [source], tokenizer)
  texts = list(sources.read_documents(source))
  pair = IndexedDataset(tmp_path / "web")
  pair.check_tokens(50_277)
  assert sidecar["documents"] == pair.num_documents == len(texts) > 10
  assert sidecar["bytes"] == sum(len(text.encode()) for text in texts)
  assert pair.dtype.name == "uint16"
  for i, text in enumerate(texts):
    assert pair.sequence(i).tolist() == [*tokenizer.encode(text).tolist(), 0]

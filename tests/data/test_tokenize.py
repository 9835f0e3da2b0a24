"""Preparing data: what is written, when it is written again, and what is refused."""

import io
import json
import os
import subprocess
import sys

import pytest

from train.config import Data
from train.data import (
  DataError,
  IndexedDataset,
  IndexedWriter,
  load_tokenizer,
  prepare,
  read_sidecar,
  sources,
  tokenize,
  tokenize_to,
)

TEXTS = {"a": ["one", "two\n", "", "caf\u00e9"], "b": ["other text", "more"]}
ENDS = (".bin", ".idx", ".json")


@pytest.fixture
def corpus(tmp_path):
  """Rows of JSON for the sets "a" and "b", in the folder of raw text."""
  (tmp_path / "raw").mkdir()
  for name, texts in TEXTS.items():
    write_rows(tmp_path / "raw" / f"{name}.jsonl", texts)
  return tmp_path / "raw"


def write_rows(path, texts):
  path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def settings(corpus, tokenizer="bytes", **changes):
  values = {
    "folder": str(corpus.parent / "tokens"),
    "tokenizer": tokenizer,
    "train": ("a",),
    "validation": ("b",),
    "sources": {name: str(corpus / f"{name}.jsonl") for name in TEXTS},
  }
  return Data(**values | changes)


def texts_of(data, name, tokenizer):
  """The documents of a set, decoded; each must end as it should, and only there."""
  pair = IndexedDataset(f"{data.folder}/{name}")
  documents = [pair.sequence(i).tolist() for i in range(pair.num_sequences)]
  assert all(ids.index(tokenizer.end_of_text) == len(ids) - 1 for ids in documents)
  assert pair.num_documents == pair.num_sequences
  return [tokenizer.decode(ids) for ids in documents]


def stamps(folder):
  """What changes when a file is written again."""
  return {name: os.stat(os.path.join(folder, name)).st_ino for name in sorted(os.listdir(folder))}


def contents(folder):
  return {name: open_bytes(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}


def open_bytes(path):
  with open(path, "rb") as file:
    return file.read()


@pytest.mark.parametrize("spec", ["bytes", "bpe:260"])
def test_documents_come_back_and_the_sidecar_counts_them(corpus, spec):
  data = settings(corpus, spec)
  sidecars = prepare(data)
  tokenizer = load_tokenizer(spec, data.folder)
  for name, texts in TEXTS.items():
    kept = [text for text in texts if text]
    assert texts_of(data, name, tokenizer) == kept
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
  names = {name + end for name in TEXTS for end in ENDS}
  assert set(os.listdir(data.folder)) == names | ({"tokenizer.json"} if spec != "bytes" else set())


def test_the_dtype_follows_the_vocabulary(corpus, tmp_path):
  class Large:
    spec = fingerprint = "large"
    vocab_size, end_of_text = 100_000, 99_999
    encode_batch = load_tokenizer("bytes").encode_batch
    pieces = load_tokenizer("bytes").pieces

  tokenize_to(tmp_path / "x", [str(corpus / "b.jsonl")], Large())
  pair = IndexedDataset(tmp_path / "x")
  assert pair.dtype.name == "int32" and pair.sequence(0)[-1] == 99_999


def test_several_inputs_are_read_one_after_the_other(corpus, tmp_path):
  tokenizer = load_tokenizer("bytes")
  inputs = [str(corpus / "b.jsonl"), str(corpus / "a.jsonl")]
  sidecar = tokenize_to(tmp_path / "new" / "folder" / "x", inputs, tokenizer)
  data = settings(corpus, folder=str(tmp_path / "new" / "folder"))
  assert texts_of(data, "x", tokenizer) == ["other text", "more", "one", "two\n", "caf\u00e9"]
  assert sidecar["documents"] == 5


@pytest.mark.parametrize("spec", ["bytes", "bpe:260"])
def test_nothing_is_made_twice(corpus, spec):
  data = settings(corpus, spec)
  first = prepare(data)
  before = stamps(data.folder)
  assert prepare(data) == first
  assert stamps(data.folder) == before


def made_again(data, **options):
  """Prepares again and returns which files were written anew."""
  before = stamps(data.folder)
  prepare(data, **options)
  return {name for name, stamp in stamps(data.folder).items() if before.get(name) != stamp}


SET_A = {"a" + end for end in ENDS}
SET_B = {"b" + end for end in ENDS}


def test_changed_text_is_tokenized_again(corpus):
  data = settings(corpus)
  prepare(data)
  write_rows(corpus / "b.jsonl", ["changed"])
  assert made_again(data) == SET_B
  assert texts_of(data, "b", load_tokenizer("bytes")) == ["changed"]


def test_another_tokenizer_tokenizes_again_and_a_bpe_stays_while_its_size_does(corpus):
  prepare(settings(corpus))
  assert made_again(settings(corpus, "bpe:260")) == SET_A | SET_B | {"tokenizer.json"}
  assert made_again(settings(corpus, "bpe:258")) == SET_A | SET_B | {"tokenizer.json"}
  write_rows(corpus / "a.jsonl", ["zzzz" * 50])
  assert made_again(settings(corpus, "bpe:258")) == SET_A  # models depend on the tokenizer
  everything = SET_A | SET_B | {"tokenizer.json"}
  assert made_again(settings(corpus, "bpe:258"), force=True) == everything


@pytest.mark.parametrize("damage", [*ENDS, "cut"])
def test_damaged_files_are_made_again(corpus, damage):
  data = settings(corpus)
  prepare(data)
  before = contents(data.folder)
  path = os.path.join(data.folder, "a" + (".bin" if damage == "cut" else damage))
  if damage == "cut":
    os.truncate(path, 4)
  elif damage == ".json":
    with open(path, "w") as file:
      file.write("[")
  else:
    os.unlink(path)
  assert made_again(data) <= SET_A
  assert contents(data.folder) == before


def test_a_bpe_is_trained_on_the_training_sets_alone(corpus):
  prepare(settings(corpus, "bpe:260"))
  first = load_tokenizer("bpe:260", settings(corpus).folder).fingerprint
  write_rows(corpus / "b.jsonl", ["qqqq" * 100])
  prepare(settings(corpus, "bpe:260"), force=True)
  assert load_tokenizer("bpe:260", settings(corpus).folder).fingerprint == first
  write_rows(corpus / "a.jsonl", ["qqqq" * 100])
  prepare(settings(corpus, "bpe:260"), force=True)
  assert load_tokenizer("bpe:260", settings(corpus).folder).fingerprint != first


def test_a_bpe_sees_a_bounded_share_of_every_source(corpus, monkeypatch):
  write_rows(corpus / "a.jsonl", ["ab" * 500] * 100)
  write_rows(corpus / "b.jsonl", ["cd" * 500] * 100)
  monkeypatch.setattr(tokenize, "BPE_BYTES", 5000)
  origins = [str(corpus / "a.jsonl"), str(corpus / "b.jsonl")]
  sample = "".join(tokenize._sample(origins, tokenize._Progress("", None)))
  assert sample == "ab" * 1250 + "cd" * 1250


def test_batches_and_threads_do_not_change_the_files(corpus, tmp_path, monkeypatch):
  write_rows(corpus / "a.jsonl", [f"document {i}\n" * (i % 7 * 20) for i in range(200)])
  expected = None
  for batch, piece in ((1 << 21, 1 << 14), (1, 30), (1000, 100), (10**9, 10**9)):
    monkeypatch.setattr(tokenize, "BATCH", batch)
    monkeypatch.setattr("train.data.tokenizers.PIECE", piece)
    data = settings(corpus, "bpe:270")
    prepare(data, force=True)
    found = contents(data.folder)
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
    assert contents(folder) == expected


def test_text_is_not_read_far_ahead_of_what_is_written(tmp_path, monkeypatch):
  read = written = furthest = 0

  def documents(files, skipped):
    nonlocal read
    for _ in range(500):
      read += 1
      yield "x" * 10

  class Writer(IndexedWriter):
    def add_document(self, ids):
      nonlocal written, furthest
      furthest = max(furthest, read - written)
      written += 1
      super().add_document(ids)

  monkeypatch.setattr(tokenize, "BATCH", 50)  # characters: five documents
  monkeypatch.setattr(sources, "read_inputs", documents)
  monkeypatch.setattr(tokenize, "IndexedWriter", Writer)
  (tmp_path / "a.txt").write_text("x")
  tokenize_to(tmp_path / "x", [str(tmp_path / "a.txt")], load_tokenizer("bytes"))
  assert written == 500
  assert furthest <= 5 * (tokenize.AHEAD + 1)


def test_an_error_in_the_text_leaves_what_was_there(corpus):
  data = settings(corpus)
  prepare(data)
  before = contents(data.folder)
  with open(corpus / "a.jsonl", "a") as file:
    file.write("{broken\n")
  with pytest.raises(DataError, match=r"a.jsonl, line 5: not JSON"):
    prepare(data)
  assert contents(data.folder) == before


def test_a_stop_before_the_sidecar_leaves_none_that_belongs_to_other_files(corpus, monkeypatch):
  def stop(*_):
    raise KeyboardInterrupt

  data = settings(corpus)
  prepare(data)
  write_rows(corpus / "a.jsonl", ["changed"])
  with monkeypatch.context() as patch:
    patch.setattr(tokenize, "_write_json", stop)
    with pytest.raises(KeyboardInterrupt):
      prepare(data)
  assert read_sidecar(f"{data.folder}/a") is None
  assert prepare(data)["a"] == read_sidecar(f"{data.folder}/a") is not None


def test_progress_is_shown_when_wanted(corpus, capsys):
  prepare(settings(corpus, "bpe:260"))
  assert capsys.readouterr() == ("", "")
  prepare(settings(corpus, "bpe:260"), progress=True)
  assert capsys.readouterr() == ("", "")  # nothing to do, nothing to say
  prepare(settings(corpus, "bpe:260"), progress=True, force=True)
  out, err = capsys.readouterr()
  lines = [line.split(",")[0] for line in err.splitlines()]
  assert out == ""
  assert lines == [
    "train bpe:260: 3 documents",
    "tokenize a: 3 documents",
    "tokenize b: 2 documents",
  ]
  assert "0.0 MB" in err and "MB/s" in err and "1 empty skipped" in err


def test_progress_is_one_line_on_a_terminal_and_a_line_each_ten_seconds_elsewhere(monkeypatch):
  for live, shown, lines in ((True, 51, 1), (False, 2, 2)):
    clock = [0.0]
    monkeypatch.setattr(tokenize.time, "monotonic", lambda clock=clock: clock[0])
    out = io.StringIO()
    out.isatty = lambda live=live: live
    report = tokenize._Progress("t", out)
    for _ in range(100):
      clock[0] += 0.125
      report.add(1_000_000)
    report.close()
    assert out.getvalue().count("documents") == shown
    assert out.getvalue().count("\n") == lines
    assert out.getvalue().endswith("t: 100 documents, 100.0 MB, 8.0 MB/s\n")


def test_the_standard_library_is_divided_by_the_role_of_the_set(tmp_path):
  data = Data(
    folder=str(tmp_path),
    tokenizer="bytes",
    train=("train",),
    validation=("held_out",),
    sources={"train": "python-stdlib", "held_out": "python-stdlib"},
  )
  sidecars = prepare(data)
  train, held_out = sidecars["train"], sidecars["held_out"]
  assert train["source"] == ["python-stdlib:train"]
  assert held_out["source"] == ["python-stdlib:validation"]
  for sidecar in (train, held_out):
    kept = list(sources.read_documents(sidecar["source"][0]))
    assert sidecar["bytes"] == sum(len(text.encode()) for text in kept)
    assert sidecar["tokens"] == sidecar["bytes"] + len(kept)
  assert train["bytes"] > 10 * held_out["bytes"] > 0


def test_files_without_a_source_are_used_as_they_are(corpus):
  data = settings(corpus)
  sidecars = prepare(data)
  before = stamps(data.folder)
  for sources_ in ({}, {"a": "absent.jsonl", "b": "$NOT_SET_HERE/b.jsonl"}):
    assert prepare(settings(corpus, sources=sources_)) == sidecars
  os.unlink(f"{data.folder}/b.json")
  assert prepare(settings(corpus, sources={})) == sidecars | {"b": None}
  del before["b.json"]
  assert stamps(data.folder) == before


def test_files_without_a_source_must_be_whole_and_of_the_right_tokenizer(corpus):
  data = settings(corpus, sources={})
  with pytest.raises(DataError, match=r"the set 'a' has no files .*a.bin .*data.sources\['a'\]"):
    prepare(data)
  prepare(settings(corpus))
  prepare(settings(corpus, "bpe:260", folder=str(corpus.parent / "bpe")))
  path = str(corpus.parent / "bpe" / "tokenizer.json")
  with pytest.raises(DataError, match=r"a.bin was made with the tokenizer 'bytes', not with"):
    prepare(settings(corpus, path, sources={}))
  os.truncate(f"{data.folder}/a.bin", 4)
  with pytest.raises(DataError, match=r"a.idx, offset"):
    prepare(data)


def test_a_bpe_needs_text_to_train_on(corpus):
  with pytest.raises(DataError, match=r"has to be trained on text, but data\.sources names none"):
    prepare(settings(corpus, "bpe:260", sources={}))
  prepare(settings(corpus, "bpe:260"))
  prepare(settings(corpus, "bpe:260", sources={}))
  with pytest.raises(DataError, match=r"has 260 entries, but data\.tokenizer='bpe:270' asks"):
    prepare(settings(corpus, "bpe:270", sources={}))


def test_a_missing_source_is_named(corpus):
  data = settings(corpus, sources={"a": "absent.txt", "b": "absent.txt"})
  with pytest.raises(DataError, match=r"there is no file or folder 'absent.txt'"):
    prepare(data)


def test_text_that_is_all_empty_is_named(corpus):
  write_rows(corpus / "a.jsonl", ["", ""])
  message = r"a.jsonl' holds no text: 1 files, \{'empty': 2\} documents skipped"
  with pytest.raises(DataError, match=message):
    prepare(settings(corpus))
  assert os.listdir(settings(corpus).folder) == []


def test_a_folder_that_cannot_be_made_is_named(corpus):
  with pytest.raises(DataError, match=r"cannot write .*a.jsonl/x.*choose another folder"):
    prepare(settings(corpus, folder=str(corpus / "a.jsonl" / "x")))


def test_a_full_disk_is_named_and_leaves_nothing(corpus, monkeypatch):
  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(tokenize.os, "replace", full)
  with pytest.raises(DataError, match=r"cannot write .*No space left on device\. Free space"):
    prepare(settings(corpus))
  assert os.listdir(settings(corpus).folder) == []


def test_a_set_may_not_take_the_name_of_the_tokenizer(corpus):
  with pytest.raises(DataError, match="the set 'tokenizer' needs another name"):
    prepare(settings(corpus, train=("tokenizer",), sources={}))


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_are_at_least_one(corpus, workers):
  with pytest.raises(DataError, match=f"workers={workers} must be at least 1"):
    prepare(settings(corpus), workers=workers)


@pytest.mark.parametrize("text", ["[1]", "{}", '{"tokens": 0, "bytes": 1}', '{"tokens": "9"}', "{"])
def test_a_damaged_sidecar_is_named(tmp_path, text):
  (tmp_path / "a.json").write_text(text)
  with pytest.raises(DataError, match=r"a.json .*Delete it and prepare the data again"):
    read_sidecar(tmp_path / "a")
  assert read_sidecar(tmp_path / "b") is None


def test_tokenizing_does_not_load_jax():
  code = "import sys, train.data; sys.exit(bool({'jax', 'grain', 'flax'} & set(sys.modules)))"
  env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
  subprocess.run([sys.executable, "-c", code], env=env, check=True)


def test_real_rows_with_the_50277_tokenizer(given, tmp_path):
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

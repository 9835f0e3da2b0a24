"""Preparing data: which files are created, replaced, or used as they are."""

import os
from pathlib import Path

import pytest

from train.config import Data
from train.data import DataError, load_or_train, load_tokenizer, prepare, sources, tokenize

ENDS = (".bin", ".crc32", ".idx", ".json")
SET_A = {"a" + end for end in ENDS}
SET_B = {"b" + end for end in ENDS}


def stamps(folder):
  """Identity of a file, which changes when it is rewritten."""
  files = {path.name: path.stat() for path in Path(folder).iterdir()}
  return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in files.items()}


@pytest.mark.parametrize("spec", ["bytes", "bpe:260"])
def test_prepare_up_to_date_files_unchanged(corpus, spec):
  data = corpus.settings(spec)
  first = prepare(data)
  before = stamps(data.folder)
  assert prepare(data) == first
  assert stamps(data.folder) == before


def made_again(data, **options):
  """Prepares again; returns the files that were rewritten."""
  before = stamps(data.folder)
  prepare(data, **options)
  return {name for name, stamp in stamps(data.folder).items() if before.get(name) != stamp}


def test_prepare_changed_text_tokenized_again(corpus):
  data = corpus.settings()
  prepare(data)
  corpus.write("b", ["changed"])
  assert made_again(data) == SET_B
  assert corpus.texts_in(data.folder, "b", load_tokenizer("bytes")) == ["changed"]


def test_prepare_files_of_another_config_left_alone(corpus):
  """Two configs that share a folder, with other tokenizers or other text of a set."""
  prepare(corpus.settings("bpe:260"))
  before = corpus.contents(corpus.settings().folder)
  other = str(corpus.raw / "b.jsonl")
  for data, message in (
    (corpus.settings("bytes"), r"b.bin was created with tokenizer=bpe:260, not bytes: by another"),
    (corpus.settings("bpe:258"), r"tokenizer.json has 260 entries, but data.tokenizer='bpe:258'"),
    (
      corpus.settings("bpe:260", sources={"a": other, "b": other}),
      r"a.bin was created with source=",
    ),
  ):
    with pytest.raises(DataError, match=message):
      prepare(data)
    assert corpus.contents(corpus.settings().folder) == before
  everything = SET_A | SET_B | {"tokenizer.json"}
  assert made_again(corpus.settings("bpe:258"), force=True) == everything


def test_prepare_text_changed_after_the_bpe_was_trained_keeps_it(corpus):
  prepare(corpus.settings("bpe:258"))
  corpus.write("a", ["zzzz" * 50])
  assert made_again(corpus.settings("bpe:258")) == SET_A  # models depend on the tokenizer
  os.unlink(f"{corpus.settings().folder}/tokenizer.json")
  everything = SET_A | SET_B | {"tokenizer.json"}
  assert made_again(corpus.settings("bpe:258")) == everything  # of the same config


@pytest.mark.parametrize("damage", [*ENDS, "cut"])
def test_prepare_damaged_files_replaced(corpus, damage):
  data = corpus.settings()
  prepare(data)
  before = corpus.contents(data.folder)
  path = os.path.join(data.folder, "a" + (".bin" if damage == "cut" else damage))
  if damage == "cut":
    os.truncate(path, 4)
  elif damage == ".json":
    with open(path, "w") as file:
      file.write("[")
  else:
    os.unlink(path)
  assert made_again(data) <= SET_A
  assert corpus.contents(data.folder) == before


def test_prepare_bpe_trained_on_training_sets_only(corpus):
  prepare(corpus.settings("bpe:260"))
  first = load_tokenizer("bpe:260", corpus.settings().folder).fingerprint
  corpus.write("b", ["qqqq" * 100])
  prepare(corpus.settings("bpe:260"), force=True)
  assert load_tokenizer("bpe:260", corpus.settings().folder).fingerprint == first
  corpus.write("a", ["qqqq" * 100])
  prepare(corpus.settings("bpe:260"), force=True)
  assert load_tokenizer("bpe:260", corpus.settings().folder).fingerprint != first


def test_prepare_bpe_text_per_source_bounded(corpus, monkeypatch):
  corpus.write("a", ["ab" * 500] * 100)
  corpus.write("b", ["cd" * 500] * 100)
  monkeypatch.setattr(tokenize, "BPE_BYTES", 5000)
  origins = [str(corpus.raw / "a.jsonl"), str(corpus.raw / "b.jsonl")]
  sample = "".join(tokenize._sample(origins, tokenize.Progress("", None)))
  assert sample == "ab" * 1250 + "cd" * 1250


@pytest.mark.slow
def test_prepare_standard_library_split_by_role(tmp_path):
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


def test_prepare_files_without_source_used(corpus, capsys):
  data = corpus.settings()
  sidecars = prepare(data)
  prepare(corpus.settings(sources=corpus.settings().sources | {"b": "absent.jsonl"}), progress=True)
  line = f"b: 'absent.jsonl' is not on this machine; {data.folder}/b.bin was created from '"
  assert capsys.readouterr().err.startswith(line)
  before = stamps(data.folder)
  for sources_ in ({}, {"a": "absent.jsonl", "b": "$NOT_SET_HERE/b.jsonl"}):
    assert prepare(corpus.settings(sources=sources_)) == sidecars
  os.unlink(f"{data.folder}/b.json")
  assert prepare(corpus.settings(sources={})) == sidecars | {"b": None}
  del before["b.json"]
  assert stamps(data.folder) == before


def test_prepare_files_without_source_checked(corpus):
  data = corpus.settings(sources={})
  with pytest.raises(DataError, match=r"the set 'a' has no files .*a.bin .*data.sources\['a'\]"):
    prepare(data)
  prepare(corpus.settings())
  prepare(corpus.settings("bpe:260", folder=str(corpus.raw.parent / "bpe")))
  path = str(corpus.raw.parent / "bpe" / "tokenizer.json")
  with pytest.raises(DataError, match=r"a.bin was tokenized by 'bytes', not by"):
    prepare(corpus.settings(path, sources={}))
  os.truncate(f"{data.folder}/a.bin", 4)
  with pytest.raises(DataError, match=r"a.idx, offset"):
    prepare(data)


def test_prepare_bpe_without_text_raises(corpus):
  with pytest.raises(DataError, match=r"must be trained, but there is no text .* in data\.so"):
    prepare(corpus.settings("bpe:260", sources={}))
  prepare(corpus.settings("bpe:260"))
  prepare(corpus.settings("bpe:260", sources={}))
  with pytest.raises(DataError, match=r"has 260 entries, but data\.tokenizer='bpe:270' needs 270"):
    prepare(corpus.settings("bpe:270", sources={}))


def test_load_or_train_bpe_from_sources(corpus, tmp_path):
  origins = [str(corpus.raw / "a.jsonl")]
  tokenizer = load_or_train("bpe:260", tmp_path / "new", origins)
  assert tokenizer.vocab_size == 260
  before = stamps(tmp_path / "new")
  again = load_or_train("bpe:260", tmp_path / "new", origins)
  assert again.fingerprint == tokenizer.fingerprint and stamps(tmp_path / "new") == before
  assert load_or_train("bytes", tmp_path / "other", []).spec == "bytes"
  assert not (tmp_path / "other").exists()


def test_prepare_missing_source_named(corpus):
  data = corpus.settings(sources={"a": "absent.txt", "b": "absent.txt"})
  with pytest.raises(DataError, match=r"there is no file or folder 'absent.txt'"):
    prepare(data)


def test_prepare_unwritable_folder_named(corpus):
  with pytest.raises(DataError, match=r"cannot write .*a.jsonl/x.*use another folder"):
    prepare(corpus.settings(folder=str(corpus.raw / "a.jsonl" / "x")))


def test_prepare_set_named_tokenizer_rejected(corpus):
  with pytest.raises(DataError, match="the set 'tokenizer' needs another name"):
    prepare(corpus.settings(train=("tokenizer",), sources={}))

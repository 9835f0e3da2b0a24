"""Token files for tests: small generated ones, and real ones if available."""

import json
import os
from pathlib import Path

import pytest

from train.config import Data
from train.data import IndexedDataset, IndexedWriter


@pytest.fixture
def write_pair(tmp_path):
  """Writes documents as a pair in a temporary folder and returns its prefix."""

  def write(documents, name="pair", dtype="uint16"):
    with IndexedWriter(tmp_path / name, dtype) as writer:
      for ids in documents:
        writer.add_document(ids)
    return str(tmp_path / name)

  return write


@pytest.fixture
def given():
  """Path inside the folder LNSSM_DATA; skips the test without it."""

  def find(relative):
    root = os.environ.get("LNSSM_DATA")
    if not root:
      pytest.skip("the environment variable LNSSM_DATA names no folder of data")
    if not (path := Path(root) / relative).exists():
      pytest.skip(f"LNSSM_DATA holds no {relative}")
    return path

  return find


class Corpus:
  """Rows of JSON for the sets "a" and "b" in the folder `raw`, and settings that use them."""

  texts = {"a": ["one", "two\n", "", "caf\u00e9"], "b": ["other text", "more"]}  # noqa: RUF012

  def __init__(self, folder):
    self.raw, self.folder = folder / "raw", folder / "tokens"
    self.raw.mkdir()
    for name, texts in self.texts.items():
      self.write(name, texts)

  def write(self, name, texts):
    rows = [json.dumps({"text": text}) + "\n" for text in texts]
    (self.raw / f"{name}.jsonl").write_text("".join(rows))

  def settings(self, tokenizer="bytes", **changes):
    values = {
      "folder": str(self.folder),
      "tokenizer": tokenizer,
      "train": ("a",),
      "validation": ("b",),
      "sources": {name: str(self.raw / f"{name}.jsonl") for name in self.texts},
    }
    return Data(**values | changes)

  @staticmethod
  def texts_in(folder, name, tokenizer):
    """Decoded documents of a set; each must have end-of-text exactly at its end."""
    pair = IndexedDataset(f"{folder}/{name}")
    documents = [pair.sequence(i).tolist() for i in range(pair.num_sequences)]
    assert all(ids.index(tokenizer.end_of_text) == len(ids) - 1 for ids in documents)
    assert pair.num_documents == pair.num_sequences
    return [tokenizer.decode(ids) for ids in documents]

  @staticmethod
  def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@pytest.fixture
def corpus(tmp_path):
  return Corpus(tmp_path)

"""Token files of tokenizers that put BOS or EOS around a text, and of text that spells them out."""

import itertools
import json

import numpy as np
import pytest

from lnssm_jax.pretrained.special_tokens import Added
from lnssm_jax.pretrained.tokenizers import FileTokenizer, encode_whole
from tests.pretrained.test_tokenizer_files import write
from train.cli.main import main
from train.config import Data
from train.data import DataError, IndexedDataset, prepare, read_sidecar
from train.data.tokenizers import load_tokenizer, tokenizer_of, train_bpe

ROWS = [("The capital of France is", " Paris"), ("P", "aris is"), ("<|im_start|>user", "\nhi<s>")]


@pytest.fixture
def settings(tmp_path):
  """Settings of the set "a", rows with prompts or their texts, for a tokenizer's folder."""
  rows = [json.dumps({"ask": ask, "answer": answer}) + "\n" for ask, answer in ROWS]
  (tmp_path / "a.jsonl").write_text("".join(rows))

  def make(case, rows=True, **changes):
    folder = write(tmp_path / case, case).parent
    fields = ("ask", "answer") if rows else ("answer",)
    values = {"folder": str(tmp_path / "tokens"), "tokenizer": str(folder), "train": ("a",)}
    values |= {"sources": {"a": str(tmp_path / "a.jsonl")}, "fields": {"a": fields}}
    return Data(**values | changes)

  return make


def rows_of(data):
  pair = IndexedDataset(f"{data.folder}/a")
  starts = np.append(pair.document_starts, pair.num_tokens)
  for first, last in itertools.pairwise(starts):
    weights = None if pair.weights is None else pair.weights[first:last].tolist()
    yield pair.tokens[first:last].tolist(), weights


@pytest.mark.parametrize(
  "case", ["metaspace_bos", "metaspace_bos_eos", "unigram_eos", "byte_level"]
)
@pytest.mark.parametrize("in_text", ["text", "parse"])
def test_rows_are_encoded_as_the_one_text_that_they_are(settings, case, in_text):
  """Tokens around them are no targets, but the end of the text is."""
  data = settings(case, special_tokens=in_text)
  sidecar = prepare(data)["a"]
  tokenizer = tokenizer_of(data)
  before, after = map(list, tokenizer.added)
  end = [] if after == [tokenizer.end_of_text] else [tokenizer.end_of_text]
  for (ids, weights), (ask, answer) in zip(rows_of(data), ROWS, strict=True):
    assert ids == [*encode_whole(tokenizer, ask + answer, in_text).tolist(), *end]
    ((_, start),) = tokenizer.encode_continuations([(ask, answer)], in_text)
    prompt = len(before) + start
    assert weights == [0] * prompt + [1] * (len(ids) - prompt)
  said = {"before": before, "after": after} if any(tokenizer.added) else {}
  said |= {"in_text": "parse"} if in_text == "parse" else {}
  assert sidecar.get("special_tokens", {}) == said
  assert sidecar["completions"] == "whole"
  assert prepare(data)["a"] == sidecar
  prepare(settings(case, special_tokens=in_text, targets={"a": "last"}), force=True)
  for ids, weights in rows_of(data):
    assert np.flatnonzero(weights).tolist() == [len(ids) - 2]


def test_documents_have_what_the_files_put_around_a_text_unless_told_not_to(settings):
  """Token files of either are not taken for those of the other, nor for an older version's."""
  data = settings("metaspace_bos", rows=False)
  sidecar = prepare(data)["a"]
  tokenizer = tokenizer_of(data)
  assert tokenizer.added == Added((1,))
  for (ids, _), (_, answer) in zip(rows_of(data), ROWS, strict=True):
    assert ids == [1, *tokenizer.encode(answer).tolist(), 2]
  assert sidecar["special_tokens"] == {"before": [1], "after": []}
  plain = settings("metaspace_bos", rows=False, add_special_tokens="none")
  message = r"a.bin was created with special_tokens=\{'before': \[1\].*, not None: by another"
  with pytest.raises(DataError, match=message):
    prepare(plain)
  old = prepare(plain, force=True)["a"]
  assert "special_tokens" not in old and "completions" not in old
  assert all(ids[0] != 1 for ids, _ in rows_of(plain))
  with pytest.raises(DataError, match=r"created with special_tokens=None, not \{'before': \[1\]"):
    prepare(data)
  with pytest.raises(DataError, match=r"special_tokens=None, not \{'in_text': 'parse'\}"):
    prepare(
      settings("metaspace_bos", rows=False, add_special_tokens="none", special_tokens="parse")
    )


def test_last_target_is_the_text_s_before_what_is_put_after_it(settings, tmp_path):
  config = {"add_eos_token": True, "eos_token": "<|im_end|>"}
  data = settings("metaspace_bos", targets={"a": "last"}, end_of_text="</s>")
  write(tmp_path / "metaspace_bos", "metaspace_bos", config)
  prepare(data)
  (after,) = tokenizer_of(data).added.after
  for ids, weights in rows_of(data):
    assert ids[-2:] == [after, 2] and after != 2
    assert np.flatnonzero(weights).tolist() == [len(ids) - 3]


def test_tokenizer_that_was_trained_here_has_no_settings_of_others(tmp_path):
  text = ["the capital of the river"] * 3
  tokenizer = train_bpe("bpe:257", tmp_path, text)
  config = {"add_bos_token": True, "bos_token": "<|endoftext|>"}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  assert load_tokenizer("bpe:257", tmp_path).added == tokenizer.added == Added()


def test_rows_of_an_older_version_are_encoded_again(settings):
  data = settings("byte_level")
  new = prepare(data)["a"]
  path = f"{data.folder}/a.json"
  sidecar = read_sidecar(f"{data.folder}/a")
  old = {name: value for name, value in sidecar.items() if name != "completions"}
  with open(path, "w") as file:
    json.dump(old, file)
  assert prepare(data)["a"] == new


def test_command_has_the_options(settings, tmp_path, capsys):
  data = settings("metaspace_bos_eos", rows=False)
  command = ["tokenize", "--input", data.sources["a"], "--tokenizer", data.tokenizer]
  command += ["--fields", "answer"]
  tokenizer = tokenizer_of(data)
  for options, before, in_text in (
    ([], [1], "text"),
    (["--add-special-tokens", "none", "--special-tokens", "parse"], [], "parse"),
  ):
    out = str(tmp_path / f"x{len(options)}" / "a")
    assert main([*command, *options, "--output", out]) == 0, capsys.readouterr().err
    first = IndexedDataset(out).sequence(2).tolist()
    assert first == [*before, *tokenizer.encode(ROWS[2][1], in_text).tolist(), 2]


def test_tokenizer_alone_in_a_folder_adds_the_same(settings, tmp_path):
  """As `export` writes a tokenizer whose settings were in another file."""
  path = write(tmp_path / "a", "metaspace_bos", {"add_eos_token": True, "eos_token": "</s>"})
  tokenizer = FileTokenizer(path)
  (tmp_path / "b.json").write_bytes(tokenizer.standalone)
  alone = FileTokenizer(tmp_path / "b.json")
  assert alone.added == tokenizer.added == Added((1,), (2,))
  assert FileTokenizer(tmp_path / "b.json", added=Added()).standalone != alone.standalone

"""Targets with weights: what is written, what windows and documents have, what is rejected."""

import json

import numpy as np
import pytest

from train.cli.main import main
from train.config import ConfigError, Data
from train.data import (
  DataError,
  IndexedDataset,
  IndexedWriter,
  fingerprints,
  load_tokenizer,
  packing,
)
from train.data.bits_per_byte import tokens_per_byte
from train.data.tokenize import prepare
from train.data.windows import Documents, TokenWindows, eval_batches, train_batches
from train.runs import bindings

DOCUMENTS = ([5, 6, 7], [8, 9], [10, 11, 12, 13])
WEIGHTS = ([9, 1, 0.5], [0, 0], [0, 2, 0, 1])


@pytest.fixture
def weighted(tmp_path):
  """A pair of documents with weights; the first token of each is never a target."""
  with IndexedWriter(tmp_path / "pair", "uint16", weighted=True) as writer:
    for ids, weights in zip(DOCUMENTS, WEIGHTS, strict=True):
      writer.add_document(ids, weights)
  return tmp_path / "pair"


@pytest.fixture
def chat(tmp_path):
  """Returns a function that makes settings for rows of a prompt and a completion."""
  path = tmp_path / "chat.jsonl"
  rows = [("What is 1 + 1? ", "2"), ("", "no prompt"), ("no completion", ""), ("caf\u00e9: ", "é!")]
  path.write_text("".join(json.dumps({"ask": p, "answer": a}) + "\n" for p, a in rows))

  def settings(tokenizer="bytes", **changes):
    values = {
      "folder": str(tmp_path / "tokens"),
      "tokenizer": tokenizer,
      "train": ("chat",),
      "sources": {"chat": str(path)},
      "fields": {"chat": ("ask", "answer")},
    }
    return Data(**values | changes)

  settings.rows = [row for row in rows if row[1]]
  return settings


def test_windows_have_the_weights_of_their_targets(weighted):
  window = TokenWindows(weighted, seq_len=4, vocab_size=20)[1]
  assert window["targets"].tolist() == [10, 11, 12, 13]
  assert window["weights"].tolist() == [0, 2, 0, 1]
  ignored = TokenWindows(weighted, seq_len=8, vocab_size=20, boundaries="ignore")[0]
  assert ignored["weights"].tolist() == [1, 0.5, 0, 0, 0, 2, 0, 1]
  assert TokenWindows(weighted, 8, 20)[0]["weights"].tolist() == [1, 0.5, 0, 0, 0, 2, 0, 1]


def test_rows_are_whole_in_their_windows(weighted, tmp_path):
  """The largest first, each where it leaves least room; the rest is padding of weight 0."""
  windows = TokenWindows(weighted, 4, 20, "ignore", whole=[True])
  first, second = windows
  assert first["tokens"].tolist() == [10, 11, 12, 8]
  assert first["targets"].tolist() == [11, 12, 13, 9]
  assert first["weights"].tolist() == [2, 0, 1, 0]
  assert first["segment_ids"].tolist() == [0, 0, 0, 1]
  assert second["tokens"].tolist() == [5, 6, 0, 0] and second["targets"].tolist() == [6, 7, 0, 0]
  assert second["weights"].tolist() == [1, 0.5, 0, 0]
  assert second["segment_ids"].tolist() == [0, 0, 1, 1]
  crops = train_batches(windows, seed=0, global_batch=8, order="random_crops", threads=0)
  assert {tuple(row) for row in next(crops)["tokens"]} == {(10, 11, 12, 8), (5, 6, 0, 0)}
  both = TokenWindows([weighted, weighted], 4, 20, whole=[False, True])
  assert len(both) == 4 and both[2]["tokens"].tolist() == [10, 11, 12, 8]
  assert both.places == [5, 8]  # a crop is as often of either as they have tokens
  alone = TokenWindows(weighted, 4, 20, whole=[True], packed=False)
  assert [window["tokens"][0] for window in alone] == [5, 8, 10]
  with pytest.raises(DataError, match=r"2 of 3 rows have more than seq_len \+ 1 = 2 tokens"):
    TokenWindows(weighted, 1, 20, whole=[True])
  with IndexedWriter(tmp_path / "one", "uint16") as writer:
    writer.add_document([1])
  with pytest.raises(DataError, match=r"one.bin has no row of two tokens"):
    TokenWindows(tmp_path / "one", 4, 20, whole=[True])


def test_rows_of_equal_size_keep_their_order_in_the_fullest_windows():
  """Pinned: with another order runs no longer resume where they stopped."""
  assert packing.best_fit([2, 2, 3, 1, 2, 4], 4) == [[5], [2, 3], [0, 1], [4]]


def test_document_means_are_weighted_and_documents_without_targets_left_out(weighted):
  source = Documents(weighted, 4, 20)
  assert (len(source), source.num_predicted) == (2, 4)
  (batch,) = eval_batches(source, 2)
  np.testing.assert_allclose(batch["weights"], [[2 / 3, 1 / 3, 0, 0], [2 / 3, 0, 1 / 3, 0]])
  assert Documents(weighted, 2, 20).num_predicted == 2  # cut before the other two


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:260"])
def test_only_completion_and_end_of_text_are_targets(chat, tokenizer):
  """No merge joins the end of these prompts with their completions."""
  data = chat(tokenizer)
  sidecar = prepare(data)["chat"]
  codec, pair = load_tokenizer(tokenizer, data.folder), IndexedDataset(f"{data.folder}/chat")
  assert sidecar["skipped"] == {"empty": 1} and pair.num_documents == len(chat.rows)
  starts = pair.document_starts
  for number, (prompt, completion) in enumerate(chat.rows):
    ids = pair.sequence(number)
    weights = pair.weights[starts[number] : starts[number] + len(ids)]
    before = int((weights == 0).sum())
    assert (weights[before:] == 1).all()
    assert codec.decode(ids[:before].tolist()) == prompt
    assert codec.decode(ids[before:-1].tolist()) == completion
    assert ids[-1] == codec.end_of_text


def test_last_token_of_each_row_is_the_target(chat):
  data = chat(targets={"chat": "last"})
  prepare(data)
  pair = IndexedDataset(f"{data.folder}/chat")
  ends = np.append(pair.document_starts[1:], pair.num_tokens)
  assert np.flatnonzero(pair.weights[:]).tolist() == (ends - 2).tolist()
  assert pair.tokens[:][ends - 2].tolist() == [ord("2"), ord("t"), ord("!")]


def test_other_fields_or_targets_are_of_another_config(chat):
  """With force they replace a pair, and one without weights keeps none of those before it."""
  first = prepare(chat())["chat"]
  assert prepare(chat())["chat"] == first
  with pytest.raises(DataError, match=r"chat.bin was created with targets=completion, not last"):
    prepare(chat(targets={"chat": "last"}))
  assert prepare(chat(targets={"chat": "last"}), force=True)["chat"]["weights_sha256"]
  texts = chat(fields={"chat": ("answer",)})
  with pytest.raises(DataError, match=r"created with fields=\['ask', 'answer'\], not"):
    prepare(texts)
  sidecar = prepare(texts, force=True)["chat"]
  assert sidecar["fields"] == ["answer"] and "weights_sha256" not in sidecar
  pair = IndexedDataset(f"{texts.folder}/chat")
  assert pair.weights is None and pair.sequence(0).tolist() == [ord("2"), 256]
  assert tokens_per_byte(texts.folder, ["chat"]) is not None
  prepare(chat(), force=True)
  assert tokens_per_byte(texts.folder, ["chat"]) is None  # a mean over completions only


def test_changed_weights_are_seen(chat):
  data = chat()
  sidecars = prepare(data)
  before = bindings.inputs(data, sidecars)["data"]
  path = f"{data.folder}/chat.weights"
  np.fromfile(path, "<f4").__add__(1).tofile(path)
  with pytest.raises(DataError, match="chat are not as they were written: sampled blocks"):
    prepare(data)
  without = {key: value for key, value in sidecars["chat"].items() if key != "sample"}
  wrong = fingerprints.change(f"{data.folder}/chat", without, whole=True)
  assert wrong == "the content of chat.weights has changed"
  now = bindings.inputs(data, {"chat": {**sidecars["chat"], "weights_sha256": "other"}})["data"]
  now["chat"]["sample"] = before["chat"]["sample"]
  assert bindings.changed_sets(before, now) == ["chat"]


def test_command_tokenizes_named_fields(chat, tmp_path, capsys):
  source = chat().sources["chat"]
  command = ["tokenize", "--input", source, "--output", str(tmp_path / "out"), "--tokenizer"]
  assert main([*command, "bytes", "--fields", "ask", "answer"]) == 0
  assert (IndexedDataset(tmp_path / "out").weights[:] == 0).any()
  assert main([*command, "bytes", "--fields", "answer", "--targets", "completion"]) == 2
  assert "data.targets.out='completion' needs data.fields.out" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("weights", "message"),
  [([1, 2], r"2 tokens|3 tokens and weights of shape \(2,\)"), ([1, -1, 0], "weight -1.0"),
   ([1, 1, float("nan")], "token 2 has the weight nan")],
)  # fmt: skip
def test_writer_rejects_wrong_weights(tmp_path, weights, message):
  with (
    pytest.raises(DataError, match=message),
    IndexedWriter(tmp_path / "a", "uint16", weighted=True) as writer,
  ):
    writer.add_document([1, 2, 3], weights)
  assert list(tmp_path.iterdir()) == []


def test_damaged_weights_are_rejected(weighted):
  path = weighted.with_name("pair.weights")
  raw = path.read_bytes()
  path.write_bytes(raw[:-4])
  with pytest.raises(DataError, match=r"pair.weights: found 32 bytes, expected 36 for the 9"):
    IndexedDataset(weighted)
  path.write_bytes(raw[:-4] + np.float32(np.nan).tobytes())
  with pytest.raises(DataError, match=r"pair.weights, bytes 0 to 16384, have another checksum"):
    TokenWindows(weighted, 4, 20)[1]
  weighted.with_name("pair.crc32").unlink()  # as a pair of another program
  with pytest.raises(DataError, match=r"pair.weights: token 8 has the weight nan"):
    TokenWindows(weighted, 4, 20)[1]
  with (
    pytest.raises(DataError, match="weights; use IndexedWriter"),
    IndexedWriter(weighted.with_name("b"), "uint16") as writer,
  ):
    writer.add_document([1], [1])


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"fields": {"x": ("a",)}}, "data.fields has 'x', which is in neither"),
    ({"fields": {"chat": (*"abcd",)}}, r"data.fields.chat=\('a', 'b', 'c', 'd'\) must be the key"),
    ({"fields": {"chat": ("a", "b", "b")}}, r"\('a', 'b', 'b'\) must be .* none of them twice"),
    ({"fields": {}, "targets": {"chat": "completion"}}, "needs data.fields.chat with two keys"),
    ({"targets": {"chat": "first"}}, "data.targets.chat='first' is not a choice"),
  ],
)
def test_wrong_fields_rejected(chat, changes, message):
  with pytest.raises(ConfigError, match=message):
    chat(**changes)


def test_rows_without_the_keys_are_named(chat, tmp_path):
  with pytest.raises(DataError, match=r'line 1: found the keys .*"text".*data\.fields'):
    prepare(chat(fields={}))
  (tmp_path / "plain.txt").write_text("x")
  with pytest.raises(DataError, match=r"plain.txt has no rows with 'ask' and 'answer'"):
    prepare(chat(sources={"chat": str(tmp_path / "plain.txt")}))

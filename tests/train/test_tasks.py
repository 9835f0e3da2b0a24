"""Tasks that score a model, against direct computation."""

import functools
import json
import math

import numpy as np
import pytest

import train
from lnssm_jax import prefill
from lnssm_jax.generate import SamplingOptions
from lnssm_jax.pretrained import texts
from tests import byte_model
from tests.byte_model import MODEL, log_probs
from tests.train.test_export import random_params
from train import config
from train.cli.main import main
from train.data import DataError
from train.data.tokenizers import load_tokenizer
from train.runs import export
from train.scoring import commands, perplexity


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return byte_model.exported(tmp_path_factory.mktemp("model") / "exported")


@pytest.fixture(scope="module")
def loaded(folder):
  return train.load_model(folder)


@pytest.fixture
def write(tmp_path):
  """Returns a function that writes rows as .jsonl."""

  def make(rows, name="samples.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)

  return make


def test_scores_of_a_batch_are_those_of_each_text_alone(loaded, monkeypatch):
  monkeypatch.setattr(texts, "_CHUNK", 4)
  pairs = [("", "a longer text"), ("xy", "z"), ("", "ab"), ("context", " and more"), ("", "abc")]
  found = texts.scores(loaded.model, loaded.tokenizer, pairs, batch=2)
  for (context, text), score in zip(pairs, found, strict=True):
    expected, likeliest = log_probs(loaded, context + text)
    first = max(0, len(context) - 1)
    np.testing.assert_allclose(score.log_probs, expected[first:], atol=2e-5)
    np.testing.assert_array_equal(score.likeliest, likeliest[first:])


@pytest.mark.parametrize("mixer", ["lrn", "softmax_attention"])
def test_common_contexts_are_read_once(mixer, tmp_path, monkeypatch):
  """Three contexts in batches of two; of the learned positions, each row has its own."""
  limit = {"learned_positions": 16, "mixer_options": {"max_length": 16}}
  change = {"mixer": mixer} | (limit if mixer == "softmax_attention" else {})
  model = config.Model(**{**config.to_dict(MODEL), **change})
  export.write(tmp_path / "out", model, random_params(model), load_tokenizer("bytes"), 7)
  loaded, read, whole = train.load_model(tmp_path / "out"), [], prefill.read_prompts

  def read_prompts(model, prompts):
    read.extend(bytes(prompt.tolist()).decode() for prompt in prompts)
    return whole(model, prompts, 4)

  monkeypatch.setattr(prefill, "read_prompts", read_prompts)
  monkeypatch.setattr(texts, "_CHUNK", 4)
  contexts = {"longer context": 2, "one": 3, "other": 2, "alone": 1, "x": 2}
  pairs = [
    (context, f"{n}{n}"[: n + 1]) for context, times in contexts.items() for n in range(times)
  ]
  found = texts.scores(loaded.model, loaded.tokenizer, pairs[::-1], batch=2)[::-1]
  for (context, text), score in zip(pairs, found, strict=True):
    expected, likeliest = log_probs(loaded, context + text)
    np.testing.assert_allclose(score.log_probs, expected[len(context) - 1 :], atol=2e-5)
    np.testing.assert_array_equal(score.likeliest, likeliest[len(context) - 1 :])
  assert sorted(set(read)) == ["longer contex", "on", "othe"]
  assert len(read) == 4  # batches of one size


def test_continuation_ends_before_the_first_of_the_strings(loaded, monkeypatch):
  options = SamplingOptions(max_tokens=12, temperature=9, seed=3)
  complete = functools.partial(texts.complete, loaded.model, loaded.tokenizer)
  whole = complete(["a", "bc"], options)
  until = (whole[0][4:7], whole[0][2:5])
  assert not any(end in whole[1] for end in until)
  expected = [whole[0].split(until[1])[0], whole[1]]
  for look in (1, 5, 32):
    monkeypatch.setattr(texts, "_LOOK", look)
    assert complete(["a", "bc"], options, until=until) == expected


@pytest.mark.parametrize("chunk", [4, 8])
def test_padding_of_a_batch_beyond_the_cache_changes_nothing(chunk, tmp_path, monkeypatch):
  monkeypatch.setattr(texts, "_CHUNK", chunk)
  change = {"mixer": "softmax_attention", "mixer_options": {"max_length": 6}}
  model = config.Model(**{**config.to_dict(MODEL), **change})
  export.write(tmp_path / "out", model, random_params(model), load_tokenizer("bytes"), 7)
  attention = train.load_model(tmp_path / "out")
  (score,) = texts.scores(attention.model, attention.tokenizer, [("", "1234567")])
  np.testing.assert_allclose(score.log_probs, log_probs(attention, "1234567")[0], atol=2e-5)


def test_lm_reports_corpora_documents_and_positions(loaded, write):
  documents = ["the first document", "another", "x"]
  path = write([{"text": text} for text in documents])
  report = perplexity.lm(loaded, [path])
  parts = [-log_probs(loaded, text)[0] for text in documents[:2]]  # the last has one token
  nats = np.concatenate(parts)
  (row,) = report.tables["corpora"]
  assert (row["documents"], row["tokens"]) == (2, 23)
  assert row["nats_per_token"] == pytest.approx(nats.mean(), rel=1e-5)
  assert row["perplexity"] == pytest.approx(math.exp(nats.mean()), rel=1e-4)
  assert row["bits_per_byte"] == pytest.approx(nats.mean() / math.log(2), rel=1e-5)
  means = [part.mean() for part in parts]
  assert row["document_perplexity"] == pytest.approx(math.exp(np.mean(means)), rel=1e-4)
  each = report.details["documents"]
  np.testing.assert_allclose([row["nats_per_token"] for row in each], means, rtol=1e-5)
  np.testing.assert_allclose([row["perplexity"] for row in each], np.exp(means), rtol=1e-4)
  bits = [row["bits_per_byte"] for row in each]
  np.testing.assert_allclose(bits, np.array(means) / math.log(2), rtol=1e-5)
  buckets = {(each["from"], each["to"]): each for each in report.tables["positions"]}
  assert list(buckets) == [(1, 1), (2, 3), (4, 7), (8, 15), (16, 17)]
  second = np.mean([part[1:3] for part in parts])
  assert buckets[2, 3]["nats_per_token"] == pytest.approx(second, rel=1e-5)
  assert perplexity.lm(loaded, [path], length=5).tables["corpora"][0]["tokens"] == 8


def test_lm_sets_have_the_names_they_are_given(loaded, write, tmp_path):
  path, odd = write([{"text": "some text", "content": "x y"}]), tmp_path / "a=b.txt"
  odd.write_text("other")
  rows = perplexity.lm(loaded, [f"web={path}", str(odd), path]).tables["corpora"]
  assert [row["set"] for row in rows] == ["web", str(odd), path]
  assert [row["tokens"] for row in rows] == [8, 4, 8]
  (row,) = perplexity.lm(loaded, [path], key="content").tables["corpora"]
  assert row["tokens"] == 2
  with pytest.raises(ValueError, match="two sets of text are named 'web'; name one of them"):
    perplexity.lm(loaded, [f"web={path}", f"web={odd}"])


def test_extrapolate_scores_the_same_tokens_at_each_length(loaded, write, tmp_path):
  pytest.importorskip("matplotlib")
  path = write([{"text": "abcdefghij"}, {"text": "klmnopqrstuvw"}])
  report = perplexity.extrapolate(loaded, path, train_length=4, times=(1, 2, 4))
  stream = [*b"abcdefghij", 256, *b"klmnopqrstuvw", 256]
  rows = report.tables["lengths"]
  assert [(row["length"], row["tokens"]) for row in rows] == [(4, 16), (8, 16), (16, 16)]
  logits = np.asarray(loaded.model(np.array(stream[:16])[None])[0][0], np.float64)
  nats = np.log(np.exp(logits).sum(-1)) - logits[np.arange(16), stream[1:17]]
  assert rows[2]["nats_per_token"] == pytest.approx(nats.mean(), rel=1e-5)
  assert rows[2]["beyond"] == pytest.approx(math.exp(nats[4:].mean()), rel=1e-4)
  assert rows[0]["beyond"] is None
  report.draw(tmp_path / "lengths.png")
  assert (tmp_path / "lengths.png").stat().st_size > 5000
  with pytest.raises(DataError, match=r"has 24 tokens to predict, less than the 32"):
    perplexity.extrapolate(loaded, path, train_length=4, times=(1, 8))
  with pytest.raises(ValueError, match=r"use --train-length N"):
    perplexity.extrapolate(loaded, path)


@pytest.mark.parametrize(
  "arguments",
  [
    ["lm", "{model}", "{text}"],
    ["extrapolate", "{model}", "{text}", "--train-length", "8", "--times", "1", "2"],
  ],
  ids=lambda arguments: arguments[0],
)
def test_command_prints_a_table(arguments, folder, write, capsys):
  paths = {
    "model": str(folder),
    "text": write([{"text": "some text that is long enough"}], "text.jsonl"),
    "cloze": write([{"context": "a", "continuation": "b"}], "cloze.jsonl"),
    "recall": write([{"text": "a", "key": "b", "value": "c"}], "fda.jsonl"),
    "babi": write([{"input": "a", "question": "b", "target": "c"}], "qa1.jsonl"),
  }
  assert main(["task", *(argument.format(**paths) for argument in arguments)]) == 0
  assert capsys.readouterr().out.startswith(f"{arguments[0]}, model {folder}, step 7")


def test_every_task_names_what_is_missing(capsys):
  for task in commands.TASKS:
    try:
      assert main(["task", task.name]) == 2
    except SystemExit as error:
      assert error.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "required" in line or "use either" in line


def test_model_that_is_none_is_one_line(tmp_path, capsys):
  assert main(["task", "lm", str(tmp_path), "text.txt"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "is not a run folder" in line

"""Tasks that score a model, against direct computation."""

import json
import math
import types

import numpy as np
import pytest

import train
from experiments import babilong, choices
from experiments.command import TASKS, main
from lnssm_jax.pretrained import texts
from tests import byte_model
from tests.byte_model import log_probs
from train.data import DataError


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


def test_choice_takes_the_likeliest_in_total_and_per_byte(loaded, write):
  options = ["ab", "a much longer continuation"]
  of = lambda context, text: log_probs(loaded, context + text)[0][len(context) - 1 :].sum()
  totals = [of("What?", f" {text}") for text in options]
  per_byte = [total / len(text) for total, text in zip(totals, options, strict=True)]
  best, best_per_byte = int(np.argmax(totals)), int(np.argmax(per_byte))
  rows = [{"query": "What?", "choices": options, "gold": gold} for gold in (best, 1 - best, best)]
  (row,) = choices.choice(loaded, [write(rows, "what.jsonl")]).tables["sets"]
  assert (row["set"], row["rows"], row["chance"]) == ("what", 3, 0.5)
  assert row["accuracy"] == pytest.approx(2 / 3)
  assert row["accuracy_per_byte"] == pytest.approx(2 / 3 if best == best_per_byte else 1 / 3)

  contexts = ["He said\n", "The other one said\n"]  # no space is added after white space
  best = int(np.argmax([of(context, "yes") for context in contexts]))
  rows = [{"context_options": contexts, "continuation": "yes", "gold": best}]
  assert choices.choice(loaded, [write(rows)]).tables["sets"][0]["accuracy"] == 1


def test_choice_bytes_are_those_of_the_choice_without_a_space(monkeypatch, write):
  """-7 and -13 over 1 and 2 bytes, as in `lm_eval`; over 2 and 3 bytes the first would win."""
  found = [types.SimpleNamespace(total=total) for total in (-7.0, -13.0)]
  monkeypatch.setattr(texts, "scores", lambda *args, **how: found)
  rows = [{"query": "Q", "choices": ["a", "bc"], "gold": 1}]
  model = types.SimpleNamespace(model=None, tokenizer=None, source="m", step=1)
  (row,) = choices.choice(model, [write(rows)]).tables["sets"]
  assert (row["accuracy"], row["accuracy_per_byte"]) == (0, 1)


def test_choice_characters_are_not_bytes(monkeypatch, write):
  """-4.4 and -6 over 2 and 3 characters, but 4 and 3 bytes; with spaces the first would win."""
  found = [types.SimpleNamespace(total=total) for total in (-4.4, -6.0)]
  monkeypatch.setattr(texts, "scores", lambda *args, **how: found)
  rows = [{"query": "Q", "choices": ["éé", "abc"], "gold": 1}]
  model = types.SimpleNamespace(model=None, tokenizer=None, source="m", step=1)
  (row,) = choices.choice(model, [write(rows)]).tables["sets"]
  assert (row["accuracy"], row["accuracy_per_character"], row["accuracy_per_byte"]) == (0, 1, 0)


def test_choice_chance_is_the_mean_over_rows(monkeypatch, write):
  found = [types.SimpleNamespace(total=0.0)] * 6
  monkeypatch.setattr(texts, "scores", lambda *args, **how: found)
  rows = [{"query": "Q", "choices": list("abcd"[:count]), "gold": 0} for count in (2, 4)]
  model = types.SimpleNamespace(model=None, tokenizer=None, source="m", step=1)
  (row,) = choices.choice(model, [write(rows)]).tables["sets"]
  assert row["chance"] == (1 / 2 + 1 / 4) / 2


def test_cloze_is_of_whole_continuations(monkeypatch, write):
  """Greedy generation has to give all their tokens, and the perplexity is not per token."""
  rows = [(False, True), (True, False), (True, True, True)]
  totals = (-1.0, -2.0, -6.0)
  found = [
    types.SimpleNamespace(likeliest=np.array(x), total=y, log_probs=np.full(len(x), y / len(x)))
    for x, y in zip(rows, totals, strict=True)
  ]
  monkeypatch.setattr(texts, "scores", lambda *args, **how: found)
  model = types.SimpleNamespace(model=None, tokenizer=None, source="m", step=1)
  path = write([{"context": "a", "continuation": "b"}] * 3)
  (row,) = choices.cloze(model, [path]).tables["sets"]
  assert (row["accuracy"], row["perplexity"]) == (1 / 3, pytest.approx(math.exp(3)))


def test_cloze_counts_continuations_that_greedy_generation_gives(loaded, write):
  context = "a "
  greedy = loaded.generate(context, max_tokens=1, temperature=0)
  wrong = chr((ord(greedy) + 1) % 128)
  rows = [{"context": context, "continuation": text} for text in (greedy, wrong)]
  (row,) = choices.cloze(loaded, [write(rows)]).tables["sets"]
  assert row["accuracy"] == 0.5
  totals = [log_probs(loaded, context + text)[0][1:].sum() for text in (greedy, wrong)]
  assert row["perplexity"] == pytest.approx(math.exp(-np.mean(totals)), rel=1e-4)


@pytest.mark.parametrize(
  ("answer", "right"),
  [
    (" garden.", True),
    ("Garden", True),
    (" gardener", False),
    (" the garden", False),
    ("attics, garden", False),
    ("attics; garden", False),
  ],
)
def test_babilong_answer_begins_with_the_target(answer, right):
  assert babilong.is_right(answer, "garden") == right


def test_babilong_asks_after_the_input(loaded, write, monkeypatch):
  seen = []

  def complete(model, tokenizer, prompts, options, until=()):
    seen.extend(prompts)
    assert (options.temperature, options.top_p) == (0, None)
    return [" hall."] * len(prompts)

  monkeypatch.setattr(texts, "complete", complete)
  rows = [{"input": "Al is here.", "question": "Where?", "target": x} for x in ("hall", "attic")]
  report = babilong.run(loaded, [write(rows, "qa1_0k.jsonl")])
  assert seen == ["Al is here. Where? The answer is"] * 2
  assert report.tables == {"sets": [{"set": "qa1_0k", "rows": 2, "accuracy": 0.5}]}
  files = [write(rows[:1], "qa2_0k.jsonl"), write(rows[:1], "qa1_1k.jsonl")]
  report = babilong.run(loaded, [write(rows, "qa1_0k.jsonl"), *files])
  assert report.tables["accuracy by length"] == [
    {"length": "0k", "qa1": 0.5, "qa2": 1.0, "mean": 0.75},
    {"length": "1k", "qa1": 1.0, "qa2": None, "mean": 1.0},
  ]
  report = babilong.run(loaded, [*files, write(rows, "other.jsonl")])
  assert list(report.tables) == ["sets"]


@pytest.mark.parametrize(
  ("run", "row", "message"),
  [
    (choices.choice, {"query": "a"}, r"line 1: found {'query': 'a'}, expected .query. and"),
    (choices.choice, {"query": "a", "choices": ["b"]}, r"found .*\['b'\].* of two texts or more"),
    (choices.choice, {"query": "a", "choices": ["", "b"]}, r"found .*\['', 'b'\].* no text empty"),
    (choices.choice, {"query": "a", "choices": ["b", "c"], "gold": 2}, r'a "gold" of 0 to 1'),
    (choices.cloze, ["a"], r"line 1: found \['a'\], expected texts \"context\" and"),
    (
      choices.cloze,
      {"context": "", "continuation": "b" * 99},
      r"found {'context': '', 'continuation': 'b+\.\.\.b+'}, .* neither of them empty",
    ),
    (babilong.run, {"input": "a"}, r'strings "input", "question" and "target"'),
    (
      babilong.run,
      {"input": "a", "question": "b", "target": " "},
      r"'target': ' '}, expected .* \"target\", which is not empty",
    ),
  ],
)
def test_rows_of_another_format_raise(run, row, message, write):
  with pytest.raises(DataError, match=message):
    run(types.SimpleNamespace(), [write([row])])


@pytest.mark.parametrize(
  "arguments",
  [
    ["cloze", "{model}", "{cloze}"],
    ["babilong", "{model}", "{babi}", "--max-tokens", "2"],
    ["recall", "{model}", "{recall}", "--twice", "--max-tokens", "2"],
    ["niah", "{model}", "--lengths", "400", "--kinds", "single_1", "--samples", "1"],
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
  assert main([*(argument.format(**paths) for argument in arguments)]) == 0
  assert capsys.readouterr().out.startswith(f"{arguments[0]}, model {folder}, step 7")


def test_every_task_names_what_is_missing(capsys):
  for task in TASKS:
    try:
      assert main([task.name]) == 2
    except SystemExit as error:
      assert error.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "required" in line or "use either" in line

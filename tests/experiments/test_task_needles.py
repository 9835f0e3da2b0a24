"""`task niah`: needles and their places, questions, and scores of answers."""

import types

import numpy as np
import pytest

from experiments import needles
from experiments.command import main
from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.tokenizers import ByteTokenizer


@pytest.mark.parametrize("kind", needles.KINDS)
def test_needles_are_in_the_haystack_and_the_prompt_is_full(kind):
  tokenizer, task = ByteTokenizer(), needles.KINDS[kind]
  made = needles.make(kind, 1500, tokenizer, seed=1)
  size = len(tokenizer.encode(made.prompt))
  assert 1400 < size <= 1500
  assert len(set(made.values)) == len(made.values) == task.values * task.queries
  for value in made.values:
    assert made.prompt.count(value) == 1
    assert len(value) == (36 if task.uuids else 7)
  assert made.prompt.count("The special ") == task.keys * task.values
  assert (needles.NOISE[0] in made.prompt) == task.repeated
  assert needles.make(kind, 1500, tokenizer, seed=1) == made
  assert needles.make(kind, 1500, tokenizer, seed=2).values != made.values


# Of each kind: needles in the text, words asked for, values of the answer.
HIDDEN = {
  **dict.fromkeys(("single_1", "single_2", "single_3"), (1, 1, 1)),
  "multikey": (4, 1, 1),
  "multivalue": (4, 1, 4),
  "multiquery": (4, 4, 4),
}


@pytest.mark.parametrize("kind", needles.KINDS)
def test_needles_of_all_seeds_are_anywhere_in_any_order(kind, monkeypatch):
  """Words differ, and values have seven digits, or are UUIDs."""
  monkeypatch.setattr(needles, "WORDS", needles.WORDS[:4])  # all of them, where four are hidden
  text = ["It was so long ago that none of them knew when it had been."]
  made = [needles.make(kind, 900, ByteTokenizer(), seed, text) for seed in range(60)]
  count, asked, answers = HIDDEN[kind]
  places, ends, orders, digits = [], [], set(), set()
  for prompt, values in made:
    body, question = prompt.split("\n\n")[1:]
    parts = body.split(". ")
    at = [n for n, part in enumerate(parts) if part.startswith("The special")]
    words = [parts[n].split(" of ")[1].split()[0] for n in at]
    assert len(at) == count and len(values) == answers
    assert len(set(words)) == (1 if kind == "multivalue" else count)
    assert sum(word in question for word in set(words)) == asked
    places += [n / (len(parts) - 1) for n in at]
    ends += [at[0] == 0, at[-1] == len(parts) - 1]
    held = [next((i for i, v in enumerate(values) if v in parts[n]), None) for n in at]
    orders.add(tuple(held))
    digits |= {value[0] for value in values}
  assert 0.4 < np.mean(places) < 0.6 and any(ends[::2]) and any(ends[1::2])
  assert len(orders) == {"multikey": 4}.get(kind, 1) if answers == 1 else len(orders) > 10
  assert len(digits) >= 9


def test_unknown_kind_of_needles_is_named_before_the_model(capsys):
  kinds = ["--kinds", "single_1", "foo"]
  assert main(["niah", "no-model", "--lengths", "500", *kinds]) == 2
  assert capsys.readouterr().err.startswith("error: kind='foo' is not known; use one of single_1")


def test_needles_of_own_text_use_its_sentences(tmp_path):
  (tmp_path / "text.txt").write_text("One sentence\nhere. Two are there. Three")
  text = needles.sentences(str(tmp_path / "text.txt"))
  assert text == ["One sentence here.", "Two are there.", "Three."]
  assert "Two are there." in needles.make("single_2", 800, ByteTokenizer(), 0, text).prompt
  with pytest.raises(ValueError, match=r"length=20 does not hold the question of 'single_1'"):
    needles.make("single_1", 20, ByteTokenizer(), 0)
  with pytest.raises(ValueError, match=r"length=300 .* and its answer; use 3\d\d tokens or more"):
    needles.make("single_1", 300, ByteTokenizer(), 0, answer=128)


def test_needles_score_values_in_the_answer(monkeypatch):
  """Answers with the first value only."""

  def complete(model, tokenizer, prompts, options, until=()):
    assert (options.temperature, options.max_tokens) == (0, 50)
    return [f" {made.pop(0).values[0]}." for _ in prompts]

  made = [needles.make("multivalue", 700, ByteTokenizer(), seed) for seed in range(3)]
  monkeypatch.setattr(texts, "complete", complete)
  options = {"kinds": ["multivalue"], "lengths": [750], "samples": 3, "max_tokens": 50, "batch": 2}
  loaded = types.SimpleNamespace(
    tokenizer=ByteTokenizer(), stop_tokens=(), model=None, source="m", step=1
  )
  report = needles.run(loaded, **options)
  assert report.tables["recall"] == [{"kind": "multivalue", "length": 750, "recall": 0.25}]
  assert needles.score("its number is 1234560", ["123456", "7"]) == 0.5  # as a part of another
  assert needles.score("its number is 123456", ["1234560"]) == 0  # all digits, not fewer

"""`task recall`: prompts as published, contains-match, rows of other formats."""

import json
import types

import pytest

from experiments import recall
from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.tokenizers import ByteTokenizer
from train.data import DataError

FDA = {"text": "\nDevice X. Class: II..", "key": "type of test", "value": "PCR"}
SWDE = {
  "text": "A film.\nSummary of information above... director:",
  "key": "director",
  "value": "D",
}
SQUAD = {
  "text": "In 1066 William won. The winner was",
  "value": "William",
  "context": "In 1066 William won. Question: who?",
  "question": "Who won?",
}
NQ = {
  "context": "The sky is blue. What color is the sky",
  "question": "what color is the sky",
  "answers": ["blue", "azure"],
  "orig_question": "sky color:",
}
TRIVIAQA = {
  "context": "[DOC] [TLE] Onions [PAR] The onion is a plant. The plant is",
  "question": "The plant is",
  "answers": ["onion"],
  "orig_question": "Which plant?",
}


@pytest.mark.parametrize(
  ("row", "once", "twice"),
  [
    (
      FDA,
      "Device X. Class: II. Type of test:",
      "Information about Type of test. Device X. Class: II.\nDevice X. Class: II. Type of test:",
    ),
    (SWDE, "A film. Director:", "Information about Director. A film.\nA film. Director:"),
    (
      SQUAD,
      SQUAD["text"],
      f"Who won? In 1066 William won. \n{SQUAD['text']}",
    ),
    (
      NQ,
      "The sky is blue. what color is the sky",
      "sky color The sky is blue.\nThe sky is blue. what color is the sky",
    ),
    (
      TRIVIAQA,
      "Onions  The onion is a plant. The plant is",  # JRT leaves the spaces around a marker
      "Which plant? Onions  The onion is a plant.\nOnions  The onion is a plant. The plant is",
    ),
  ],
  ids=["fda", "swde", "squad", "nq", "triviaqa"],
)
def test_prompts_are_those_of_the_paper(row, once, twice):
  assert recall.prompt_of(row) == once
  assert recall.prompt_of(row, twice=True) == twice


def test_prompt_keeps_capitals_of_its_key_and_loses_each_repetition_of_its_end():
  row = {"text": "A. FDA code: fda code: ", "key": "fDA code"}
  assert recall.prompt_of(row) == "A. FDA code:"


def test_question_without_a_text_has_all_names_of_its_answer():
  row = {"context": "Question: Which plant?\nAnswer: ", "answer": "Onion", "aliases": ["Leek"]}
  assert recall.prompt_of(row) == "Question: Which plant?\nAnswer:"
  assert recall.values_of(row) == ["Onion", "Leek"]
  assert recall.values_of({"context": "Q", "answer": "A"}) == ["A"]


def test_answers_contain_a_value_in_any_case(tmp_path, monkeypatch):
  """Rows whose prompt is longer than --length are left out."""

  def complete(model, tokenizer, prompts, options, until):
    assert (options.temperature, until) == (0, ("\n",))
    seen.extend(prompts)
    return [" It is AZURE, said he"] * len(prompts)

  seen = []
  monkeypatch.setattr(texts, "complete", complete)
  path = tmp_path / "nq.jsonl"
  long = NQ | {"context": "much longer " * 9}
  path.write_text("\n".join(json.dumps(row) for row in (NQ, long, NQ | {"answers": ["red"]})))
  model = types.SimpleNamespace(
    tokenizer=ByteTokenizer(), stop_tokens=(), model=None, source="m", step=1
  )
  report = recall.run(model, [str(path)], length=38)  # which is that of the first prompt
  assert seen == [recall.prompt_of(NQ)] * 2
  assert report.tables["sets"] == [{"set": "nq", "rows": 2, "accuracy": 0.5}]
  other = tmp_path / "long.jsonl"
  other.write_text(json.dumps(long))
  rows = recall.run(model, [str(path), str(other)], length=60).tables["sets"]
  assert [(row["rows"], row["accuracy"]) for row in rows] == [(2, 0.5), (0, None)]
  with pytest.raises(ValueError, match=r"length=3 leaves no row: .* 38 tokens; use --length 38"):
    recall.run(model, [str(other), str(path)], length=3)


@pytest.mark.parametrize(
  ("row", "twice", "message"),
  [
    ({"text": "a"}, False, r'expected "text", "key", "value", or'),
    ({"text": "a", "key": 3, "value": "b"}, False, r'expected "text", "key", "value", or'),
    (NQ | {"answers": []}, False, r"'answers': \[\].*, expected .*; none of them empty"),
    (FDA | {"value": ""}, False, r"'value': ''.*, expected .*; none of them empty"),
    ({"text": "a", "value": "b"}, True, r'expected also "context" and "question"'),
    ({"context": "Q", "answer": 3}, False, r'expected "context", "answer" and, if any'),
    ({"context": "", "answer": "A"}, False, r"'context': ''.*, expected .*; no text empty"),
    ({"context": "Q", "answer": "A"}, True, r"expected a text to read twice"),
  ],
)
def test_rows_of_another_format_raise(row, twice, message, tmp_path):
  path = tmp_path / "rows.jsonl"
  path.write_text(json.dumps(row))
  model = types.SimpleNamespace(tokenizer=ByteTokenizer())
  with pytest.raises(DataError, match=message):
    recall.run(model, [str(path)], twice=twice)

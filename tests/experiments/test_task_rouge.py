"""`task rouge`: the files of four data sets, prompts, rows to train on, and the scores."""

import json
import re
import sys
import types

import pytest

from experiments import rouge
from experiments.command import main
from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.tokenizers import ByteTokenizer
from train.data import DataError

ASQA = [
  {"question": "When?", "annotations": [{"long_answer": "In May."}, {"long_answer": "Then."}]}
]
ELI5 = [{"question": "Why?", "answer": "Because\nit is."}]
SCITLDR = {"source": ["We try.", "It works."], "target": ["It works", "A trial"]}


@pytest.fixture
def files(tmp_path):
  (tmp_path / "asqa.json").write_text(json.dumps(ASQA))
  (tmp_path / "eli5.json").write_text(json.dumps(ELI5))
  (tmp_path / "wiki.src").write_text("A hard\u2028one .\nSecond .\n")
  (tmp_path / "wiki.dst").write_text("Easy .\n2nd .\n")
  (tmp_path / "test.jsonl").write_text(json.dumps(SCITLDR))
  names = ("asqa.json", "eli5.json", "wiki.src", "test.jsonl")
  return dict(zip(rouge.KINDS, (str(tmp_path / name) for name in names), strict=True))


def test_rows_to_train_on_are_prompts_with_each_reference(files, tmp_path, capsys):
  rows = {kind: list(rouge.training_rows(kind, [path])) for kind, path in files.items()}
  assert rows["asqa"] == [("Question: When?\nAnswer:", f" {x}\n") for x in ("In May.", "Then.")]
  assert rows["eli5"] == [("Question: Why?\nAnswer:", " Because it is.\n")]
  assert rows["wikilarge"][0] == ("Sentence: A hard\u2028one .\nIn simpler words:", " Easy .\n")
  assert rows["wikilarge"][1][1] == " 2nd .\n"
  assert rows["scitldr"][1] == (
    "Abstract: We try. It works.\nSummary in one sentence:",
    " A trial\n",
  )
  path = tmp_path / "rows.jsonl"
  arguments = ["rouge", "-", files["eli5"], "--kind", "eli5", "--write", str(path)]
  assert main(arguments) == 0
  assert capsys.readouterr().out.endswith("1 rows to train on\n")
  prompt, completion = rows["eli5"][0]
  assert json.loads(path.read_text()) == {"prompt": prompt, "completion": completion}
  arguments = ["rouge", "-", files["wikilarge"], "--kind", "wikilarge", "--limit", "1"]
  assert main([*arguments, "--write", str(path)]) == 0
  assert capsys.readouterr().out.endswith("1 rows to train on\n")


def test_scores_are_mean_percents_of_greedy_answers_up_to_the_line_feed(tmp_path, monkeypatch):
  """Of the first rows of a file, with a scorer in place of that of the package."""
  made, asked, compared = [], [], []
  scores = {" one": (0.5, 0.2, 0.4), " two": (1.0, 0.6, 0.8)}

  class Scorer:
    def __init__(self, names, use_stemmer):
      made.append((names, use_stemmer))

    def score_multi(self, references, answer):
      compared.append((references, answer))
      found = zip(("precision", "recall", "fmeasure"), scores[answer], strict=True)
      return {"rougeL": types.SimpleNamespace(**dict(found))}

  def complete(model, tokenizer, prompts, options, until):
    asked.append((prompts, options.temperature, options.max_tokens, until))
    return list(scores)

  module = types.SimpleNamespace(RougeScorer=Scorer)
  monkeypatch.setitem(sys.modules, "rouge_score", types.SimpleNamespace(rouge_scorer=module))
  monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", module)
  monkeypatch.setattr(texts, "complete", complete)
  rows = [{"question": f"Why {n}?", "answer": f"For {n}."} for n in range(3)]
  (tmp_path / "eli5.json").write_text(json.dumps(rows))
  model = types.SimpleNamespace(
    tokenizer=ByteTokenizer(), stop_tokens=(), model=None, source="m", step=1
  )
  report = rouge.run(model, "eli5", [str(tmp_path / "eli5.json")], limit=2, max_tokens=7)
  assert made == [(["rougeL"], True)]
  prompts = [f"Question: Why {n}?\nAnswer:" for n in range(2)]
  assert asked == [(prompts, 0, 7, ("\n",))]
  assert compared == [(["For 0."], " one"), (["For 1."], " two")]
  row = {"set": "eli5.json", "rows": 2, "precision": 75, "recall": 40, "rouge_l": 60}
  assert report.tables["sets"] == [pytest.approx(row)]
  assert [each["rouge_l"] for each in report.details["rows"]] == pytest.approx([40, 80])


def test_score_is_that_of_the_best_reference(files, monkeypatch):
  """The longest common subsequence of "it work now" and "it work": P = 2/3, R = 1."""
  pytest.importorskip("rouge_score", reason="rouge-score is not installed: pip install rouge-score")

  def complete(model, tokenizer, prompts, options, until):
    assert (options.temperature, until) == (0, ("\n",))
    return [" It worked now"] * len(prompts)

  monkeypatch.setattr(texts, "complete", complete)
  model = types.SimpleNamespace(
    tokenizer=ByteTokenizer(), stop_tokens=(), model=None, source="m", step=1
  )
  (row,) = rouge.run(model, "scitldr", [files["scitldr"]]).tables["sets"]
  assert row["rouge_l"] == pytest.approx(80)
  assert row["precision"] == pytest.approx(200 / 3)
  assert row["recall"] == pytest.approx(100)


def test_missing_package_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
  with pytest.raises(ValueError, match=r"^task rouge needs the package rouge-score: pip install"):
    rouge.run(types.SimpleNamespace(), "asqa", [])


def test_unknown_kind_is_named_before_the_package_and_the_model(files, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
  with pytest.raises(ValueError, match=r"^kind='foo' is not known; use one of asqa"):
    rouge.run(types.SimpleNamespace(), "foo", [])
  assert main(["rouge", "no-model", files["asqa"], "--kind", "foo"]) == 2
  assert capsys.readouterr().err.startswith("error: kind='foo' is not known; use one of asqa")


def test_package_without_several_references_is_named(monkeypatch):
  old = types.SimpleNamespace(RougeScorer=types.SimpleNamespace(score=None))
  monkeypatch.setitem(sys.modules, "rouge_score", types.SimpleNamespace(rouge_scorer=old))
  monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", old)
  with pytest.raises(ValueError, match=r"^task rouge needs rouge-score 0.1.2 or newer, and an"):
    rouge.run(types.SimpleNamespace(), "asqa", [])


@pytest.mark.parametrize(
  ("kind", "name", "content", "message"),
  [
    ("asqa", "a.json", "{", r"a.json, line 1: not JSON"),
    ("asqa", "a.json", "{}", r"found dict, expected a list"),
    ("asqa", "a.json", '[{"question": "a"}]', r'row 1: expected "question" and "annotations"'),
    ("eli5", "a.json", '[{"question": "a"}]', r'row 1: expected "question" and "answer"'),
    *(
      (
        *("asqa", "a.json", f'[{{"question": "a", "annotations": {value}}}]'),
        r'row 1: expected "question" and "annotations" .*annotations.* is .*, expected ',
      )
      for value in ("5", "null", "true", "[5]", '[{"long_answer": 5}]')
    ),
    pytest.param("asqa", "a.json", "[" * 100_000, r"a.json: nested too deeply", id="nested"),
    pytest.param("eli5", "a.json", f"[{'1' * 5000}]", r"a.json: a number has 5,000", id="digits"),
    ("eli5", "a.json", '[{"question": "a", "answer": " "}]', r"row 1: a text or reference is em"),
    ("eli5", "a.json", "[]", r"a.json has no rows"),
    ("scitldr", "a.jsonl", '{"source": ["a"], "target": []}', r"line 1: .*there is no reference"),
    ("scitldr", "a.jsonl", '{"source": "a"}', r'line 1: expected lists "source" and "target"'),
    ("wikilarge", "wiki.dst", "", r"wiki.dst is not a file NAME.src"),
    ("wikilarge", "b.src", "\n", r"b.src, line 1: a text or reference is empty"),
    ("wikilarge", "b.src", "a\nb", r"b.src has 2 lines and .*b.dst has 1"),
    ("squad", "a.json", "[]", r"kind='squad' is not known; use one of asqa, eli5"),
  ],
)
def test_files_of_another_format_raise(kind, name, content, message, tmp_path):
  (tmp_path / name).write_text(content)
  (tmp_path / "b.dst").write_text("one line\n")
  error = DataError if kind != "squad" else ValueError
  with pytest.raises(error, match=re.compile(message)):
    rouge.read(kind, tmp_path / name)

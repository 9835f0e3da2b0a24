"""`task babilong-samples`; of `task babilong` the rows to train on and which answers are right."""

import json
import types

import numpy as np
import pytest

from experiments import answers, babilong, babilong_samples
from experiments.command import main
from experiments.needles import sentences
from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.tokenizers import ByteTokenizer
from train.data import DataError

STORY = """\
1 Al went home.
2 Where is Al? \thome\t1
3 Al left.
4 Bo ran.
5 Where is Bo? \tout\t4
1 Cy sat.
2 Where is Cy?\tchair\t1
"""
TEXT = " ".join(f"This is the sentence with the number {n}. No." for n in range(40))


@pytest.fixture
def places(tmp_path):
  (tmp_path / "babi").mkdir()
  (tmp_path / "babi" / "qa1_one-fact_test.txt").write_text(STORY)
  (tmp_path / "babi" / "qa1_one-fact_train.txt").write_text("")
  (tmp_path / "book.txt").write_text(TEXT)
  return tmp_path


def test_questions_follow_the_facts_of_their_own_story(places):
  found = babilong_samples.questions(places / "babi" / "qa1_one-fact_test.txt")
  assert [(len(q.facts), q.question, q.target) for q in found] == [
    (1, "Where is Al?", "home"),
    (3, "Where is Bo?", "out"),
    (1, "Where is Cy?", "chair"),
  ]
  assert found[1].facts == ["Al went home.", "Al left.", "Bo ran."]


def test_facts_keep_their_order_among_following_sentences(places):
  noise = babilong_samples.Noise(str(places / "book.txt"), ByteTokenizer())
  question = babilong_samples.Question(["Al went home.", "Al left.", "Bo ran."], "Where?", "out")
  orders, ends = set(), set()
  for seed in range(12):
    rng = np.random.default_rng(seed)
    row = babilong_samples.make(question, 300, ByteTokenizer(), noise, rng)
    assert 250 < len(ByteTokenizer().encode(babilong.prompt_of(row))) <= 300
    assert list(row) == ["input", "question", "target"]
    parts = [f"{part}." for part in row["input"].removesuffix(".").split(". ")]
    assert [part for part in parts if part in question.facts] == question.facts
    hay = [part for part in parts if part not in question.facts]
    numbers = [int(part.removesuffix(".").split()[-1]) for part in hay]  # "No." has 4 tokens
    assert numbers == [(numbers[0] + n) % 40 for n in range(len(hay))]
    orders.add((numbers[0], tuple(part in question.facts for part in parts)))
    ends |= {(end, parts[end] in question.facts) for end in (0, -1)}
  assert len(orders) > 6 and len(ends) == 4  # first and last are facts in some, not in all
  row = babilong_samples.make(question, 0, ByteTokenizer(), noise, np.random.default_rng(0))
  assert row["input"] == "Al went home. Al left. Bo ran."
  assert babilong_samples.make(question, 50, ByteTokenizer(), noise, rng) is None
  assert sentences(str(places / "book.txt"))[1] == "No."


def test_prompt_that_has_more_tokens_joined_than_apart_is_not_too_long(places):
  class Joined(ByteTokenizer):
    def encode(self, text, special_tokens="text"):
      return np.zeros(len(text) + 9 * text.count(". "), np.int32)

  noise = babilong_samples.Noise(str(places / "book.txt"), Joined())
  question = babilong_samples.Question(["Al went home."], "Where?", "home")
  row = babilong_samples.make(question, 400, Joined(), noise, np.random.default_rng(0))
  assert 300 < len(Joined().encode(babilong.prompt_of(row))) <= 400


@pytest.mark.parametrize("length", [400, 5000])
def test_prompts_reach_their_length_whatever_the_text(length, places):
  """It has 1,800 bytes, and one sentence that is too long for the shorter prompts."""
  long = f"{TEXT} {'A very long sentence ' * 12}."
  (places / "book.txt").write_text(long)
  noise = babilong_samples.Noise(str(places / "book.txt"), ByteTokenizer())
  question = babilong_samples.Question(["Al went home."], "Where?", "home")
  for seed in range(40):
    row = babilong_samples.make(
      question, length, ByteTokenizer(), noise, np.random.default_rng(seed)
    )
    assert length - 300 * (length > 500) - 50 < len(babilong.prompt_of(row)) <= length
    assert ("very" in row["input"]) == (length > 500)


@pytest.mark.parametrize("text", ["No. " * 90, "word " * 90])
def test_text_without_a_sentence_for_the_length_raises(text, places, capsys):
  (places / "book.txt").write_text(text)
  arguments = ["babilong-samples", str(places / "babi"), str(places / "book.txt")]
  arguments += ["--tokenizer", "bytes", "--write", str(places / "out"), "--tasks", "qa1"]
  assert main([*arguments, "--lengths", "0", "300"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "book.txt has no sentence of 10 tokens to half of length=300, which" in line
  assert not (places / "out").exists()


def test_command_writes_a_file_per_task_and_length(places, capsys):
  out = places / "out"
  arguments = ["babilong-samples", str(places / "babi"), str(places / "book.txt")]
  arguments += ["--tokenizer", "bytes", "--write", str(out), "--tasks", "qa1", "--samples", "2"]
  assert main([*arguments, "--lengths", "0", "2000"]) == 0
  first = {path.name: path.read_text() for path in out.iterdir()}
  assert sorted(first) == ["qa1_0k.jsonl", "qa1_2k.jsonl"]
  assert [len(text.splitlines()) for text in first.values()] == [2, 2]
  assert main([*arguments, "--lengths", "0", "2000"]) == 0
  assert {path.name: path.read_text() for path in out.iterdir()} == first
  assert main([*arguments, "--lengths", "500"]) == 0  # a file of its own, not qa1_0k
  assert (out / "qa1_0k.jsonl").read_text() == first["qa1_0k.jsonl"]
  assert len((out / "qa1_500.jsonl").read_text().splitlines()) == 2
  capsys.readouterr()
  new = [*arguments, "--write", str(places / "new")]
  assert main([*new, "--lengths", "0", "20"]) == 2
  assert not (places / "new").exists()  # nor the file of the first length
  assert capsys.readouterr().err.startswith("error: length=20 holds no story of qa1")
  assert main([*arguments, "--split", "valid"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "needs one file qa1_*valid.txt; it has none" in line
  assert main([*arguments, "--split", "train"]) == 2
  assert "has no question" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("Al went home.", r"line 1: found 'Al went home.', expected a number"),
    ("1 Where?\thome\t1", r"line 1: a question without facts"),
  ],
)
def test_file_that_is_not_babi_raises(line, message, tmp_path):
  (tmp_path / "qa1_test.txt").write_text(line)
  with pytest.raises(DataError, match=message):
    babilong_samples.questions(tmp_path / "qa1_test.txt")


def test_rows_to_train_on_and_rows_to_score_are_all_rows(tmp_path, monkeypatch, capsys):
  def complete(model, tokenizer, prompts, options, until):
    scored.extend(prompts)
    return [""] * len(prompts)

  scored = []
  monkeypatch.setattr(texts, "complete", complete)
  rows = [{"input": f"{n}.", "question": "Where?", "target": f"t{n}"} for n in range(40)]
  path, out = tmp_path / "qa1_0k.jsonl", tmp_path / "rows.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  command = ["babilong", "-", str(path), "--write", str(out)]
  assert main(command) == 2
  assert "--train-share" in capsys.readouterr().err
  assert main([*command, "--train-share", "0.05"]) == 0
  assert capsys.readouterr().out == f"{out}  2 rows to train on\n"
  trained = [json.loads(line) for line in out.read_text().splitlines()]
  model = types.SimpleNamespace(
    tokenizer=ByteTokenizer(), stop_tokens=(), model=None, source="m", step=1
  )
  report = babilong.run(model, [str(path)], train_share=0.05)
  assert report.tables["sets"][0]["rows"] == 38
  prompts = {row["prompt"]: row["completion"] for row in trained}
  assert sorted([*prompts, *scored]) == sorted(map(babilong.prompt_of, rows))
  assert {f" t{prompt.split('.')[0]}" for prompt in prompts} == set(prompts.values())
  scored.clear()
  how = {"split_seed": 0, "train_share": 0.05}
  (row,) = babilong.run(model, [str(path)], seed=7, limit=30, **how).tables["sets"]
  assert row["rows"] == len(scored) == 30 and not set(scored) & set(prompts)
  command += ["--train-share", "0.05", "--seed", "7"]  # of the drawing: the rows are the same
  assert main([*command, "--limit", "1"]) == 0
  assert json.loads(out.read_text()) == trained[0]
  assert main([*command, "--split-seed", "1"]) == 0
  other = [json.loads(line) for line in out.read_text().splitlines()]
  assert other != trained
  scored.clear()
  babilong.run(model, [str(path)], train_share=0.05, split_seed=1)
  assert len(scored) == 38 and not set(scored) & {row["prompt"] for row in other}
  one, rest = babilong.divide(rows, 0.001)
  assert (len(one), len(rest)) == (1, 39)
  with pytest.raises(ValueError, match=r"train_share=0.99 of 40 rows leaves none"):
    babilong.divide(rows, 0.99)


@pytest.mark.parametrize(
  ("answer", "target", "right"),
  [
    (" milk,football", "milk", False),
    (" milk, football", "milk", False),
    (" milk, ", "milk", True),
    (" Milk, football.", "milk,football", True),
    (" milk,football", "milk, football", True),
    (" milk,football,apple", "milk,football", False),
    (" n, w", "n,w", True),
    (" n,west", "n,w", False),
    (" football,milk", "milk,football", False),
  ],
)
def test_babilong_list_is_right_as_a_whole(answer, target, right):
  assert babilong.is_right(answer, target) == right


def test_drawn_answers_depend_on_seed_and_row_only(monkeypatch, tmp_path):
  def complete(model, tokenizer, prompts, options, until=()):
    assert (options.temperature, options.top_p, options.stop_token) == (1, 0.7, (256,))
    return [str(seed) for _, seed in zip(prompts, options.seed, strict=True)]

  monkeypatch.setattr(texts, "complete", complete)
  model = types.SimpleNamespace(model=None, tokenizer=ByteTokenizer(), stop_tokens=(256,))
  draw = lambda rows, **how: answers.answers(model, ["a"] * rows, max_tokens=1, top_p=0.7, **how)
  whole = draw(5, batch=8)
  assert draw(5, batch=2) == draw(7, batch=3)[:5] == whole
  drawn = [seed for other in range(4) for seed in draw(5, seed=other)]
  assert len(set(drawn)) == 20  # rows of one seed are not those of another
  row = {"input": "a", "question": "b", "target": "c"}
  (tmp_path / "qa1_0k.jsonl").write_text(f"{json.dumps(row)}\n" * 5)
  model.source, model.step = "m", 1
  report = babilong.run(model, [str(tmp_path)], top_p=0.7, seed=2)
  assert [each["answer"] for each in report.details["answers"]] == draw(5, seed=2)


def test_samples_of_each_seed_task_and_length_are_drawn_anew(places):
  """From another place of the text, another order of the stories, and the same for equal seeds."""
  (places / "babi" / "qa2_test.txt").write_text(STORY)

  def drawn(seed, tasks=("qa1", "qa2"), samples=3):
    how = {"tasks": tasks, "lengths": (400, 401), "samples": samples, "seed": seed}
    found = babilong_samples.rows_of(
      places / "babi", str(places / "book.txt"), ByteTokenizer(), **how
    )
    return {(task, length): rows for task, length, rows in found}

  first, again, other = drawn(0), drawn(0), drawn(1)
  assert first == again
  sets = [rows for found in (first, other) for rows in found.values()]
  begins = [row["input"].split("number ")[1].split(".")[0] for rows in sets for row in rows]
  assert len(set(begins)) > len(begins) / 2  # one of 40 sentences
  inputs = [tuple(row["input"] for row in rows) for rows in sets]
  assert len(set(inputs)) == len(inputs)
  orders = {tuple(row["target"] for row in drawn(n, ("qa1",))["qa1", 400]) for n in range(9)}
  assert len(orders) > 2 and all(set(order) == {"home", "out", "chair"} for order in orders)

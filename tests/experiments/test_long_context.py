"""experiments.long_context: rows to train on, which answers are right, and a small run of all."""

import csv
import itertools
import json
import re
import types

import numpy as np
import pytest

from experiments import long_context, long_context_parts, rouge
from experiments.long_context_parts import STORIES, Sizes
from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.tokenizers import ByteTokenizer
from train.data.tokenizers import train_bpe

TINY = (
  "dim=16,num_layers=1,channel_hidden=8,vocab_size=400,length=704,rows=1,steps=2,babilong_steps=1,"
  "needles_steps=1,rouge_steps=1,stories=2,hidden=2,unit=120,samples=2,summaries=2,batch=2,"
  "tokens=1408,longest=2"
)
SIZES = Sizes.parse(TINY)
PLACES = {"train": ("attic", "barn", "castle"), "test": ("dairy", "forge", "garden")}
NAMES = dict(zip(STORIES, ("Al", "Bo", "Cy", "Di", "Ed"), strict=True))
# Sentences of at least 10 tokens, and the words of needles and questions, for a BPE to learn.
TEXT = " ".join(
  f"The {a} keeper of the {b} special number of {b} is {n}{n}{n} in this hidden text. Remember it."
  " Question: which special number did the text name? Answer: the special number is here."
  for n, (a, b) in enumerate(itertools.permutations(("amber", "brave", "calm", "dusty", "idle"), 2))
)


def story(name: str, place: str) -> str:
  return f"1 {name} went to the {place}.\n2 Where is {name}?\t{place}\t1\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  folder = tmp_path_factory.mktemp("data")
  for name in ("lm", "babi", "scitldr"):
    (folder / name).mkdir()
  for name, end in (("train", "Elm trees."), ("val", "Oak trees.")):
    rows = [{"text": f"{TEXT} {end}"}] * 4
    (folder / "lm" / f"{name}_books.jsonl").write_text("\n".join(map(json.dumps, rows)))
  for split, places in PLACES.items():
    for task in STORIES:
      stories = "".join(story(NAMES[task], place) for place in places)
      (folder / "babi" / f"{task}_x_{split}.txt").write_text(stories)
    row = json.dumps({"source": ["We hid a number."], "target": [f"A {split} number"]})
    (folder / "scitldr" / f"{split}.jsonl").write_text(f"{row}\n{row}\n")
  return folder


@pytest.fixture(scope="module")
def tokenizer(data, tmp_path_factory):
  return train_bpe("bpe:400", tmp_path_factory.mktemp("bpe"), [TEXT])


def test_rows_are_packed_whole_and_only_answers_are_targets():
  tokenizer, rng = ByteTokenizer(), np.random.default_rng(0)
  rows = [("p" * int(rng.integers(1, 30)), f" {n:03}") for n in range(40)]
  windows = long_context_parts.packed([*rows, ("p" * 40, "long")], tokenizer, 40)
  found = []
  for tokens, targets, segments, weights in zip(*windows.values(), strict=True):
    for segment in range(segments[-1] + 1):
      here = segments == segment
      if not weights[here].any():
        assert segment == segments[-1]  # the rest of the window
        continue
      ids = np.append(tokens[here], targets[here][-1])
      np.testing.assert_array_equal(ids[1:], targets[here])
      assert ids[-1] == tokenizer.end_of_text
      answer = targets[here][weights[here] == 1]
      found.append((tokenizer.decode(ids[: -len(answer)]), tokenizer.decode(answer[:-1])))
  assert sorted(found) == sorted(rows)
  assert len(windows["tokens"]) < 30
  with pytest.raises(ValueError, match=r"no row to train on has at most 3 tokens"):
    long_context_parts.packed(rows, tokenizer, 2)


def test_batches_of_a_seed_pass_over_all_windows_in_its_own_order():
  windows = {"tokens": np.arange(6)[:, None]}
  batches = long_context_parts.shuffled(windows, 3, (0, 7))
  first, second = (next(batches)["tokens"] for _ in range(2))
  assert first.shape == (2, 3, 1)
  orders = np.concatenate([first, second], axis=1)[..., 0]
  np.testing.assert_array_equal(np.sort(orders), [range(6)] * 2)
  assert (orders[0] != orders[1]).any()


def test_babilong_answers_are_scored_with_their_own_questions(data, tokenizer, monkeypatch):
  """A model that knows the places of Bo alone, about whom all questions of qa2 are."""

  def answers(loaded, prompts, *, max_tokens, batch):
    asked.extend(prompts)
    where = [re.search(r"went to the (\w+)\.", prompt)[1] for prompt in prompts]
    return [
      f" {place}." if "Where is Bo?" in prompt else " nowhere"
      for place, prompt in zip(where, prompts, strict=True)
    ]

  asked: list[str] = []
  monkeypatch.setattr(long_context_parts, "answers", answers)
  part = long_context_parts.babilong_part(data, tokenizer, SIZES)
  found = list(part.score(None))
  scores = {(x.of, x.length): x.value for x in found if x.measure == "accuracy"}
  for length in SIZES.babilong_lengths:
    assert [scores[task, length] for task in STORIES] == [0, 1, 0, 0, 0]
    assert scores["mean", length] == pytest.approx(0.2)
  assert all(prompt.endswith("The answer is") for prompt in asked)
  assert max(len(tokenizer.encode(prompt)) for prompt in asked) <= 4 * SIZES.unit
  learned = "".join(tokenizer.decode(row) for row in part.windows["tokens"])
  assert any(place in learned for place in PLACES["train"])
  assert not any(place in learned for place in PLACES["test"])


def test_questions_to_train_on_are_not_those_that_are_scored(data, tokenizer, monkeypatch):
  def answers(loaded, prompts, *, max_tokens, batch):
    asked.extend(prompts)
    return [f" {re.search(r'went to the (\w+)\.', prompt)[1]}" for prompt in prompts]

  asked: list[str] = []
  monkeypatch.setattr(long_context_parts, "answers", answers)
  monkeypatch.setattr(long_context_parts, "TASKS", STORIES)
  part = long_context_parts.questions_part(data, tokenizer, SIZES)
  found = {(x.of, x.measure): x.value for x in part.score(None)}
  assert found == {
    **{(of, "accuracy"): 1.0 for of in (*STORIES, "mean")},
    ("mean", "most_frequent_answer"): 0.5,
  }
  learned = "".join(tokenizer.decode(row) for row in part.windows["tokens"])
  for name, place in itertools.product(NAMES.values(), PLACES["test"]):
    fact = f"{name} went to the {place}."
    assert (fact in learned) + any(fact in prompt for prompt in asked) == 1
  assert len(asked) == 2 * len(STORIES)


def test_variance_between_groups_is_that_of_their_means():
  rng = np.random.default_rng(0)
  means, chosen = rng.normal(size=(4, 3)), rng.integers(4, size=400)
  noise = rng.normal(size=(400, 3))
  values = (means[chosen] + noise).astype(np.float32)
  groups = [values[chosen == n] for n in range(4)]
  inside = sum(((x - x.mean(0)) ** 2).sum() for x in groups)
  whole = ((values - values.mean(0)) ** 2).sum()
  assert long_context_parts.between(values, chosen, 4) == pytest.approx(1 - inside / whole, 1e-5)


def test_needles_are_of_other_books_and_fit_their_length(data, tokenizer, monkeypatch):
  """A model that knows half of the answers, and that gives 1/2 to each token of those."""

  def scores(model, tokenizer, pairs, *, batch):
    asked.extend(prompt for prompt, _ in pairs)
    for number, (prompt, answer) in enumerate(pairs):
      key = re.search(r"Answer: the special number of (\S+) is$", prompt)[1]
      right = answer == f" {re.search(rf'of {key} is (\d+)', prompt)[1]}." and number % 2 == 0
      tokens = tokenizer.encode(answer)
      likeliest = np.arange(len(tokens)) < len(tokens) - (not right)  # all but the last, or all
      yield texts.Score(tokens, np.full(len(tokens), np.log(0.5)), likeliest)

  asked: list[str] = []
  monkeypatch.setattr(texts, "scores", lambda *args, **how: list(scores(*args, **how)))
  part = long_context_parts.needles_part(data, tokenizer, SIZES)
  found = {(x.of, x.length, x.measure): x.value for x in part.score(types.SimpleNamespace(model=0))}
  assert found == {
    (kind, length, measure): pytest.approx(value)
    for kind in long_context_parts.KINDS
    for length in SIZES.needle_lengths
    for measure, value in (("recall", 0.5), ("nats_per_token", np.log(2)))
  }
  sizes = [len(tokenizer.encode(prompt)) for prompt in asked]
  assert max(sizes) <= part.reach - long_context_parts.ANSWER
  assert "Oak trees" in "".join(asked) and "Elm trees" not in "".join(asked)
  learned = tokenizer.decode(part.windows["targets"][part.windows["weights"] == 1])
  assert re.fullmatch(r"( \d{7}\.)+", learned.replace("<|endoftext|>", ""))


@pytest.fixture
def small(data, tmp_path, monkeypatch):
  """The command at a small size, up to its mixers; ROUGE-L is 25 for one reference."""
  scorer = types.SimpleNamespace(score_multi=lambda references, answer: {
    "rougeL": types.SimpleNamespace(precision=0.5, recall=0.5, fmeasure=len(references) / 4)
  })  # fmt: skip
  monkeypatch.setattr(rouge, "scorer", lambda: scorer)
  command = ["--data", str(data), "--work", str(tmp_path / "work"), "--sizes", TINY]
  return [*command, "--seeds", "0", "1", "--mixers"]


@pytest.mark.slow
def test_small_run_has_every_row_and_is_not_repeated(small, tmp_path, monkeypatch, capsys):
  table, plots = tmp_path / "rows.csv", tmp_path / "new" / "plots"
  command = [*small, "lrn", "--out", str(table), "--plots", str(plots)]
  rows = long_context.main(command)
  capsys.readouterr()
  with table.open() as file:
    assert list(csv.DictReader(file)) == rows
  found = {(r["part"], r["of"], int(r["length"]), r["measure"]) for r in rows if r["seed"] == "1"}
  wanted = {("rouge", "SciTLDR", 0, "rouge_l")}
  wanted |= {
    ("babilong", task, length, "accuracy")
    for task in (*STORIES, "mean")
    for length in (0, 120, 240, 480)
  }
  wanted |= {("babilong", "mean", n, "most_frequent_answer") for n in (0, 120, 240, 480)}
  wanted |= {
    ("needles", kind, length, measure)
    for kind in ("single_2", "multikey")
    for length in (704, 1408, 2816, 5632)
    for measure in ("recall", "nats_per_token")
  }
  wanted |= {
    ("extrapolate", "books", length, measure)
    for length in (704, 1408)
    for measure in ("nats_per_token", "perplexity", "beyond")
  }
  wanted |= {("states", "mean of layers", 704, x) for x in ("entropy", "rank", "cosine")}
  assert found == wanted and len(rows) == 2 * len(wanted)
  value = {(r["measure"], r["length"], r["seed"]): r["value"] for r in rows}
  assert value["perplexity", "704", "0"] != value["perplexity", "704", "1"]
  assert value["rouge_l", "0", "0"] == "25"
  pictures = [plots / f"long_context_{part}.png" for part in long_context.PARTS]
  assert min(path.stat().st_size for path in pictures) > 1000

  monkeypatch.setattr(long_context, "compiled", None)
  assert long_context.main(command) == rows
  pages = capsys.readouterr().out
  assert "rouge, rouge_l, mean ± standard deviation of 2 seeds:" in pages
  assert "| `lrn` | SciTLDR | 25.000 ± 0.000 |" in pages
  with pytest.raises(SystemExit):
    long_context.main([*command, "--sizes", f"{TINY},steps=3"])
  assert "use another --out" in capsys.readouterr().err
  with pytest.raises(SystemExit):
    long_context.main([*command, "--plots", str(table)])
  assert "--plots is a folder" in capsys.readouterr().err
  with pytest.raises(SystemExit):
    long_context.main(["--data", str(tmp_path), "--only", "rouge"])
  assert "has no lm/train_books.*, lm/val_books.*, scitldr/train" in capsys.readouterr().err


@pytest.mark.slow
def test_caches_hold_the_longest_text(small):
  rows = long_context.main(
    [*small, "softmax_attention", "--only", "extrapolate", "states", "rouge"]
  )
  assert {row["of"] for row in rows} == {"books", "mean of layers", "SciTLDR"}
  assert not any(row["value"] for row in rows if row["part"] == "states")
  assert all(np.isfinite(float(row["value"])) for row in rows if row["value"])


def test_dry_run_counts_tokens_of_every_part(capsys):
  assert long_context.main(["--dry-run", "--mixers", "gla", "softmax_attention"]) == []
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2 + 2 * 6
  assert "| `gla` | 23,544,576 | books | 49,152,000 |" in lines[2]

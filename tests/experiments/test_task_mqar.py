"""`lnssm-train task`: the command's frame, and training on MQAR."""

import dataclasses
import json
import re

import numpy as np
import pytest

from experiments import mqar_training
from experiments.command import main
from tests.train.test_copies import settings
from train import loop
from train.config import ConfigError, apply_overrides
from train.loop import Moment
from train.scoring.report import Report
from train.sweeps.work import Measuring

CFG = settings()
TASK = mqar_training.task_of(CFG, pairs=3, vocab_size=40)


class Scripted:
  """Copies whose accuracies are given, one list per evaluation."""

  state = None

  def __init__(self, script):
    self.script, self.evaluation, self.steps = script, -1, 0

  def __call__(self, cfg, *, seeds, learning_rates):
    self.runs = [(s, r) for s in seeds for r in learning_rates]
    return self

  def advance(self, state, batch):
    self.seen = [*getattr(self, "seen", ()), batch["tokens"]]
    self.steps += 1
    self.evaluation = -(-self.steps // 2) - 1  # two batches in an epoch
    return state, {}

  @property
  def diverged(self):
    return np.zeros(len(self.runs), bool)

  def right(self, batch):
    return np.asarray(self.script[self.evaluation])


def scripted(monkeypatch, script, steps):
  copies = Scripted(script)
  monkeypatch.setattr(mqar_training, "Copies", copies)
  cfg = dataclasses.replace(CFG, steps=steps)
  options = {"learning_rates": (1e-3, 2e-3), "seeds": (0, 1), "train_rows": 9, "test_rows": 4}
  return mqar_training.run(cfg, TASK, **options), copies


def test_training_ends_when_all_seeds_of_a_rate_have_solved_the_task(monkeypatch):
  """A copy above 0.99 keeps that accuracy. Order of copies: seed 0 at both rates, seed 1."""
  script = [[0.2, 0.995, 0.1, 0.6], [0.3, 0.4, 0.99, 0.7], [0.5, 0.3, 0.992, 1.0], [0] * 4]
  report, copies = scripted(monkeypatch, script, steps=8)
  assert copies.steps == 6
  first, second = report.tables["learning rates"]
  assert (first["accuracy"], first["min"], first["steps"]) == (pytest.approx(0.746), 0.5, 6)
  assert (second["accuracy"], second["min"], second["steps"]) == (pytest.approx(0.9975), 0.995, 6)
  assert first["std"] == pytest.approx(0.492 / 2**0.5)
  assert report.tables["best"] == [second]
  assert [run["steps"] for run in report.details["runs"]] == [6, 2, 6, 6]


def test_training_continues_at_its_position():
  """As one that was not interrupted; the position goes through JSON."""
  script = [[0.2, 0.995, 0.1, 0.6], [0.3, 0.4, 0.9, 0.7], [0.5, 0.3, 0.992, 1.0]]
  cfg, rows = dataclasses.replace(CFG, steps=8), {"train_rows": 9, "test_rows": 4}

  def begin():
    copies = Scripted(script)(cfg, seeds=(0, 1), learning_rates=(1e-3, 2e-3))
    return mqar_training.Training(cfg, TASK, copies, **rows)

  def train(training, start=0, until=8):
    now = Moment(start, None, [Measuring(training, 8, 99.0)])
    loop.train(now, training.copies.advance, training.batches(start), steps=until)
    return now.step

  whole, first, second = begin(), begin(), begin()
  assert train(whole) == 6
  assert train(first, until=3) == 3  # within the second epoch
  second.restore(json.loads(json.dumps(first.position(3))))
  second.copies.steps = first.copies.steps
  assert train(second, start=3) == 6
  assert second.position(6) == whole.position(6) and whole.step == 6
  assert second.steps.tolist() == [6, 2, 6, 6]
  for got, want in zip([*first.copies.seen, *second.copies.seen], whole.copies.seen, strict=True):
    np.testing.assert_array_equal(got, want)


def test_rates_of_copies_that_diverge_are_left_out(monkeypatch):
  diverged = property(lambda self: np.array([False, self.steps > 2, False, False]))
  monkeypatch.setattr(Scripted, "diverged", diverged)
  report, _ = scripted(monkeypatch, [[0.1, 0.8, 0.2, 0.9], [0.2, 0.0, 0.3, 0.95]], steps=4)
  first, second = report.tables["learning rates"]
  assert report.tables["best"] == [first] and first["accuracy"] == pytest.approx(0.25)
  assert second == dict.fromkeys(first) | {"learning_rate": 2e-3, "steps": 4, "diverged": 1}
  assert [run["accuracy"] for run in report.details["runs"]] == [0.2, None, 0.3, 0.95]
  assert "diverged" in report.text()


def test_runs_of_a_sweep_that_diverge_have_no_accuracy():
  copies = Scripted([[0.5, 0.7]])(CFG, seeds=(0, 1), learning_rates=(1e-3,))
  work = mqar_training.Training(CFG, TASK, copies, train_rows=8, test_rows=4)
  work.restore({"step": 2, "accuracy": [0.25, None], "steps": [2, 2]})
  copies.evaluation, work.steps[1] = 0, 4
  (first,), (second,) = work.measure(4)
  assert first == {"step": 4, "kind": "task", "accuracy": 0.5, "steps": 4}
  assert second == {"step": 4, "kind": "diverged"}
  assert [scores["accuracy"] for scores in work.scores()] == [0.5, None]


def test_training_ends_after_its_steps(monkeypatch):
  report, copies = scripted(monkeypatch, [[0.1, 0.2, 0.3, 0.4]] * 3, steps=3)
  assert copies.steps == 3
  assert report.settings["train_rows"] == 8  # two batches; the ninth row fills none
  rows = TASK.examples(9, 0).tokens
  for got, first in zip(copies.seen, (0, 4, 0), strict=True):  # in the same order in each epoch
    np.testing.assert_array_equal(got, rows[first : first + 4])


def test_learning_rates_by_default_are_the_published_four():
  expected = np.logspace(-4, -2, 4)  # Zoology
  np.testing.assert_allclose(mqar_training.LEARNING_RATES, expected, rtol=0.03)


def test_rows_in_training_are_those_of_the_seed_of_the_data():
  sizes = {"train_rows": 4, "test_rows": 4, "data_seed": 5}
  copies = Scripted([])(CFG, seeds=(0,), learning_rates=(1e-3,))
  training = mqar_training.Training(CFG, TASK, copies, **sizes)
  np.testing.assert_array_equal(training.train[0].tokens, TASK.examples(4, 5).tokens)
  np.testing.assert_array_equal(training.test[0].tokens, TASK.examples(4, 2**31 + 5).tokens)


def test_rows_of_validation_end_a_run_and_those_to_test_on_score_it():
  copies = Scripted([])(CFG, seeds=(0,), learning_rates=(1e-3, 2e-3))
  sizes = {"train_rows": 4, "test_rows": 4, "validation_rows": 4}
  training = mqar_training.Training(CFG, TASK, copies, **sizes)
  of_rows = {"validation": [0.995, 0.5], "test": [0.97, 0.996]}
  seen = {name: getattr(training, name)[0].tokens for name in of_rows}
  np.testing.assert_array_equal(seen["validation"], TASK.examples(4, 2**32).tokens)
  right = lambda batch: next(
    of_rows[name] for name, rows in seen.items() if np.array_equal(rows, batch["tokens"])
  )
  copies.right = lambda batch: np.asarray(right(batch))
  training.measure(1)
  assert training.finished  # by the first copy, although its tests are not above 0.99
  of_rows["test"] = [0.2, 0.997]
  training.measure(2)
  scores = [{"accuracy": 0.995, "steps": 1, "test accuracy": 0.97}]
  scores += [{"accuracy": 0.5, "steps": 2, "test accuracy": 0.997}]
  assert training.scores() == scores
  again = mqar_training.Training(CFG, TASK, copies, **sizes)
  again.restore(training.position(2))
  assert again.scores() == scores


@pytest.mark.slow
def test_command_trains_prints_a_table_and_writes_json(
  tiny, config_file, tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(mqar_training, "SAY_SECONDS", 0)
  cfg = tiny(seq_len=16, steps=2)
  file = tmp_path / "result.json"
  rows = ["--pairs", "2", "--train-rows", "8", "--test-rows", "4"]
  options = [*rows, "--learning-rates", "1e-3", "3e-3", "--seeds", "0"]
  command = ["mqar", "--config", config_file(cfg), *options, "--json", str(file)]
  assert main(command) == 0
  out, err = capsys.readouterr()
  assert out.startswith("mqar, mixer lrn, dim 32, layers 1, length 16, pairs 2, vocab_size 257")
  assert "learning_rate" in out
  first, *steps, last = err.splitlines()
  assert first.startswith("2 copies, ") and first.endswith(" steps an epoch; compiling")
  assert steps == [f"step {n} of at most 2" for n in (1, 2)]
  assert last.startswith("step 2 of at most 2: accuracy 0.")
  result = json.loads(file.read_text())
  assert [row["learning_rate"] for row in result["learning rates"]] == [1e-3, 3e-3]
  assert len(result["runs"]) == 2 and result["best"][0] in result["learning rates"]


def test_command_writes_the_data_it_would_train_on(tiny, config_file, tmp_path):
  path = tmp_path / "data.npz"
  options = ["--pairs", "2", "--train-rows", "6", "--test-rows", "3", "--write", str(path)]
  assert main(["mqar", "--config", config_file(tiny(seq_len=16)), *options]) == 0
  with np.load(path) as file:
    data = dict(file)
  task = mqar_training.task_of(tiny(seq_len=16), pairs=2)
  train, test = task.examples(6, 0), task.examples(3, 2**31)
  np.testing.assert_array_equal(data["train_tokens"], train.tokens)
  np.testing.assert_array_equal(data["test_tokens"], test.tokens)
  np.testing.assert_array_equal(data["test_labels"], test.labels())
  options += ["--data-seed", "3"]
  assert main(["mqar", "--config", config_file(tiny(seq_len=16)), *options]) == 0
  with np.load(path) as file:
    np.testing.assert_array_equal(file["train_tokens"], task.examples(6, 3).tokens)
    np.testing.assert_array_equal(file["test_tokens"], task.examples(3, 2**31 + 3).tokens)


@pytest.mark.slow
def test_task_that_does_not_fit_raises():
  with pytest.raises(ConfigError, match=r"vocab_size=500 of the task is larger.*=300"):
    mqar_training.task_of(CFG, pairs=2, vocab_size=500)
  with pytest.raises(ConfigError, match="test_rows=3 is less than global_batch=4"):
    mqar_training.run(CFG, TASK, test_rows=3)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"learned_positions": 15}, r"seq_len=16 is more than model.learned_positions=15; use"),
    (
      {
        "mixer": "softmax_attention",
        "mixer_options": {"max_length": 8},
        "learned_positions": 12,
      },
      r"more than model.learned_positions=12 and model.mixer_options.max_length=8; use",
    ),
    (
      {
        "mixer": ("lrn", "softmax_attention"),
        "mixer_options": {"softmax_attention": {"max_length": 8}},
        "learned_positions": 16,
      },
      r"seq_len=16 is more than model.mixer_options.softmax_attention.max_length=8; use",
    ),
  ],
)
def test_rows_beyond_the_positions_raise_with_the_settings_that_hold_them(change, message):
  cfg = settings(model=dataclasses.replace(CFG.model, **change))

  def training(cfg):
    copies = Scripted([])(cfg, seeds=(0,), learning_rates=(1e-3,))
    return mqar_training.Training(cfg, TASK, copies, train_rows=4, test_rows=4)

  with pytest.raises(ConfigError, match=message) as caught:
    training(cfg)
  named = re.findall(r"--set (\S+=16)", str(caught.value))
  assert training(apply_overrides(cfg, named)).train
  assert {name: getattr(cfg.model, name) for name in change} == change


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["mqr"], "no command 'mqr'; did you mean 'mqar'?"),
    (["mqar"], "required: --config"),
    (["mqar", "--config", "x", "--learning-rates", "0"], "0 must be a positive number"),
    (["mqar", "--config", "x", "--seeds", "-1"], "-1 must be in"),
    (["mqar", "--config", "x", "--pairs", "0"], "0 must be at least 1"),
  ],
)
def test_wrong_usage_is_one_line(arguments, message, capsys):
  with pytest.raises(SystemExit) as caught:
    main([*arguments])
  assert caught.value.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line


def test_report_shows_numbers_and_missing_values():
  rows = [{"set": "a", "bits": None, "n": 12000}, {"set": "bc", "bits": 0.5, "n": 1}]
  text = Report("lm", {"rate": 1e-4, "limit": None}, {"sets": rows}).text()
  assert text.splitlines() == [
    "lm, rate 0.0001",
    "",
    "sets",
    "  set    bits       n",
    "  a         -  12,000",
    "  bc   0.5000       1",
  ]

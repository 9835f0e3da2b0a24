"""Sweeps: which runs a file has, what is trained together, killed and resumed, and the tables."""

import contextlib
import csv
import dataclasses
import json
import os
import signal
import time
import types
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from experiments.mqar_training import Training
from experiments.recall_sweep import Recall
from tests.train.test_copies import settings
from train import trainer
from train.data.windows import train_batches
from train.runs.run_folder import RunFolder, RunFolderError
from train.step.loss import LossSums
from train.step.optimizer import make_schedule
from train.sweeps import Plot, grid, groups, plots, spec, tables, text, training

RATES, SEEDS = (3e-3, 1e-2), (0, 1)


class Killed(BaseException):
  pass


@pytest.fixture(autouse=True, scope="module")
def _equal_groups_share_their_programs():
  """Groups of equal programs compile them once: most of their time is that."""
  made, copies = {}, text.Copies

  def once(cfg, *, runs, kernels):
    assert kernels == Path(cfg.run_dir).parent / "kernels"  # of all groups of a sweep
    key = repr(dataclasses.replace(cfg, run_dir="-", data=settings().data)), repr(runs)
    if key not in made:
      new = copies(cfg, runs=runs, kernels=kernels)
      made[key] = new, jax.device_get(new.state)
    found, state = made[key]
    found.state = jax.device_put(state)
    return found

  with (
    mock.patch.object(text, "Copies", once),
    mock.patch.object(training.compile_cache, "folder", lambda *_: None),
  ):
    yield


def sweep_of(folder, runs):
  """A sweep as `spec.load` returns it."""
  inside = [spec._prepared(run, folder, ()) for run in runs]
  return spec.Sweep(folder=folder, runs=inside, chosen=inside, plot=Plot())


def text_runs(tiny, **changes):
  cfg = tiny(eval_every=8, log_every=3, data__order="random_crops", **changes)
  return grid(cfg, {"model.mixer": ("lrn",)}, learning_rates=RATES, seeds=SEEDS)


def recall_runs(**changes):
  task = Recall(pairs=3, vocab_size=40, train_rows=12, test_rows=8)
  cfg = settings(steps=7, **changes)
  return grid(cfg, {"model.dim": (16,)}, learning_rates=RATES, seeds=SEEDS, task=task)


def kill_after(monkeypatch, step, *, saved):
  """Ends a sweep, as SIGKILL would, when a group has done so many steps, saved until `saved`."""
  monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
  for kind in (text.Text, Training):
    batches = kind.batches

    def until(self, start, batches=batches):
      for at, batch in enumerate(batches(self, start), start):
        if at >= step:
          raise Killed
        if at >= saved:
          monkeypatch.setattr(training, "SAVE_SECONDS", np.inf)
        yield batch

    monkeypatch.setattr(kind, "batches", until)


def results(sweep):
  """Rows of every run, without the id of the run."""
  return [RunFolder(run.cfg.run_dir).read_rows() for run in sweep.runs]


def quiet(line):
  del line


def test_copies_of_text_see_the_batches_of_their_seeds(tiny, tmp_path, monkeypatch):
  copies = lambda cfg, *, runs, kernels: types.SimpleNamespace(runs=runs)
  monkeypatch.setattr(text, "Copies", copies)
  (found,) = groups.group(sweep_of(tmp_path, text_runs(tiny)).runs)
  cfg = found.first.cfg
  trainer.prepare(cfg.data)
  with contextlib.ExitStack() as stack:
    learning = text.Text(found, tmp_path / "kernels")
    whole, resumed = (
      stack.enter_context(contextlib.closing(learning.batches(start))) for start in (0, 2)
    )
    seen = [*(next(whole) for _ in range(3)), next(resumed)]
    for copy, (seed, _) in enumerate(found.pairs):
      options = {"seed": seed, "global_batch": 4, "order": "random_crops"}
      batches = stack.enter_context(train_batches(trainer.training_set(cfg), **options))
      expected = [next(batches) for _ in range(3)]
      for got, batch in zip(seen, [*expected, expected[2]], strict=True):
        for name, array in batch.items():
          np.testing.assert_array_equal(got[name][copy], array)


def test_copies_of_text_are_scored_by_weight_and_diverged_ones_have_no_rows(
  tiny, tmp_path, monkeypatch
):
  """Two batches of weights 3 and 1; the second run's validation loss is not finite, the third has
  diverged, the fourth skips the step."""
  sums = iter([([3.0, np.nan, 6.0, 9.0], [3.0] * 4), ([5.0, 1.0, 2.0, 3.0], [1.0] * 4)])

  class Given:
    def __init__(self, cfg, *, runs, kernels):
      self.runs, self.diverged = runs, np.array([False, False, True, False])

    def loss(self, batch):
      nats, weight = map(np.array, next(sums))
      return LossSums(nats, weight, np.zeros(4))

  monkeypatch.setattr(text, "Copies", Given)
  windows = lambda cfg, source: 2 * cfg.global_batch
  monkeypatch.setattr(text.evaluation, "count_of", windows)
  (found,) = groups.group(sweep_of(tmp_path, text_runs(tiny)).runs)
  trainer.prepare(found.first.cfg.data)
  learning = text.Text(found, tmp_path / "kernels")
  metrics = {"loss": np.array([1.0, 2.0, np.inf, np.inf]), "tokens": np.ones(4)}
  rows = learning.measure(12, metrics | {"skipped": np.array([0.0, 0.0, 1.0, 1.0])})
  assert learning.finished
  assert [step for step in range(1, 13) if learning.pauses(step)] == [3, 6, 8, 9, 12]
  kinds = [[row["kind"] for row in of_run] for of_run in rows]
  assert kinds == [["train", "eval"], ["train"], ["diverged"], ["eval"]]
  assert [of_run[0]["step"] for of_run in rows] == [12] * 4
  losses = [scores["validation loss"] for scores in learning.scores()]
  assert losses[2] is None
  np.testing.assert_array_equal(losses[:2] + losses[3:], [2.0, np.nan, 3.0])
  final = make_schedule(found.first.cfg.optimizer, 12)(11) / found.first.cfg.optimizer.peak_lr
  for (row, *_), (_, rate) in zip(rows, found.pairs, strict=True):
    if row["kind"] == "train":
      assert row["learning_rate"] == pytest.approx(float(final) * rate, rel=1e-6)


@pytest.mark.parametrize("kind", ["text", pytest.param("recall", marks=pytest.mark.slow)])
def test_killed_sweep_resumes_bit_exact_and_finished_runs_are_skipped(
  kind, tiny, tmp_path, monkeypatch
):
  runs = text_runs(tiny) if kind == "text" else recall_runs()
  whole, parts = (sweep_of(tmp_path / name, runs) for name in ("whole", "parts"))
  reference = training.train(whole, say=quiet)
  if kind == "text":
    check_against_fit(whole.runs[0], reference.scores[0], str(tmp_path / "alone"))
  assert len({json.dumps(scores) for scores in reference.scores}) == 4 - 2 * (kind == "recall")
  with monkeypatch.context() as patch:
    last, saved = (8, 6) if kind == "text" else (6, 3)
    kill_after(patch, last, saved=saved)
    with pytest.raises(Killed):
      training.train(parts, say=quiet)
    assert training.collect(parts).scores == [None] * 4
  said = []
  outcome = training.train(parts, say=said.append)
  assert any(line.startswith(f"resuming after step {saved} of") for line in said)
  assert outcome.scores == reference.scores
  assert results(parts) == results(whole)
  assert not list(parts.folder.glob("unfinished"))
  monkeypatch.setattr(text, "Copies", None)  # a second call trains nothing
  assert training.train(parts, say=said.append).scores == reference.scores
  assert said[-1] == "4 of 4 chosen runs are finished"


def check_against_fit(copy, scores, run_dir):
  """Losses, learning rates and scores of a copy are those of `train.fit` with its settings."""
  cfg = dataclasses.replace(copy.cfg, run_dir=run_dir, log_every=1)
  (expected,) = trainer.fit(cfg).validation
  assert scores["validation loss"] == pytest.approx(expected["val_loss"], rel=1e-4)
  bits = scores["validation bits per byte"]
  assert bits == pytest.approx(expected["bits_per_byte"], rel=1e-4)
  mine, theirs = (
    {row["step"]: row for row in RunFolder(place).read_rows() if row["kind"] == "train"}
    for place in (copy.cfg.run_dir, run_dir)
  )
  assert list(mine) == [3, 6, 8, 9, 12]
  for step, row in mine.items():
    for name in ("loss", "learning_rate"):
      assert row[name] == pytest.approx(theirs[step][name], rel=1e-4)


def test_run_with_other_settings_task_or_text_is_rejected(tmp_path):
  (run, *_) = sweep_of(tmp_path, recall_runs()).runs
  folder = RunFolder(run.cfg.run_dir)
  folder.path.mkdir(parents=True)
  folder.write_config(run.cfg)
  inputs = {"data": {"train": {"sha256": "x", "sample": "y"}}}
  folder.append([groups.result_row(run, 7, {"accuracy": 0.5}, inputs)])
  assert groups.finished(run, inputs) == {"accuracy": 0.5}
  local = dataclasses.replace(run.cfg, watch=("tensorboard",), log_every=3)
  assert groups.finished(dataclasses.replace(run, cfg=local), None) == {"accuracy": 0.5}
  for change, message in (
    ({"cfg": dataclasses.replace(run.cfg, steps=8)}, "steps: the folder's run has 7, this one 8"),
    ({"cfg": settings(steps=7, run_dir=run.cfg.run_dir)}, "optimizer.peak_lr: the folder's"),
    ({"task": dataclasses.replace(run.task, pairs=2)}, "task: the folder's run has {'pairs': 3"),
  ):
    with pytest.raises(RunFolderError, match=message):
      groups.finished(dataclasses.replace(run, **change), None)
  other = {"data": {"train": {"sha256": "z", "sample": "y"}}}
  with pytest.raises(RunFolderError, match="text of train: not that of the folder's run"):
    groups.finished(run, other)


def test_groups_have_one_program_each(tiny):
  mixed = [*recall_runs(), *recall_runs(seq_len=32), *text_runs(tiny)]
  sizes = lambda found: [len(each.runs) for each in found]
  assert sizes(groups.group(mixed)) == [4, 4, 4]
  assert sizes(groups.group(mixed, 3)) == [3, 1, 3, 1, 3, 1]
  assert len({each.key for each in groups.group(mixed, 3)}) == 6
  single = groups.group(text_runs(tiny)[:1])[0]
  assert single.alone and not groups.group(recall_runs()[:1])[0].alone
  of_fit = groups.group(text_runs(tiny, optimizer__ema_decay=0.9))
  assert sizes(of_fit) == [1] * 4 and of_fit[0].alone


def test_stopped_run_of_fit_is_continued_by_fit(tiny, tmp_path, fit_and_kill):
  runs = sweep_of(tmp_path, text_runs(tiny, checkpoint_every=5)).runs
  fit_and_kill(runs[0].cfg, at=7)
  found = groups.group(runs)[0].parts
  assert [len(each.runs) for each in found] == [1, 3] and found[0].alone
  chosen = spec.Sweep(folder=tmp_path, runs=runs, chosen=[runs[0]], plot=Plot())
  scores = training.train(chosen, say=quiet).scores
  assert [known is not None for known in scores] == [True, False, False, False]
  rows = RunFolder(runs[0].cfg.run_dir).read_rows()
  assert [row["step"] for row in rows if row["kind"] == "train"] == [3, 6, 9, 12]


FILE = """
from tests.train.test_copies import settings
from experiments.recall_sweep import Recall
from train.sweeps import Plot, grid
import dataclasses

def make(width, size):
  if (width, size) == (32, "b"):
    return None
  cfg = settings(steps=7)
  model = dataclasses.replace(cfg.model, dim=width)
  return dataclasses.replace(cfg, model=model), Recall(pairs=2 if size == "a" else 4)

AXES = {"width": (16, 32), "size": ("a", "b")}
SWEEP = grid(make, AXES, learning_rates=(1e-3, 2e-3), seeds=(0, 1),
             folder="{size}/{model.mixer}-{width}-{lr:g}-{seed}")
PLOT = Plot(x="width", line="size")
"""


def scored(values):
  """Runs of two widths, two rates and three seeds with these accuracies; None: not finished."""
  cfg = settings(steps=7)
  axes = {"model.dim": (16, 32)}
  runs = grid(cfg, axes, learning_rates=RATES, seeds=(0, 1, 2), task=Recall(pairs=2))
  return runs, [x if x is None else {"accuracy": x} for x in values]


def test_table_has_mean_and_spread_over_seeds_and_the_best_rate(tmp_path):
  low, high = [0.1, 0.2, 0.6], [0.5, 0.5, 0.8]
  runs, scores = scored([*low, *high, 0.9, 0.9, None, 0.3, 0.1, 0.2])
  rows = tables.write(tmp_path, runs, [x and x | {"steps": 7} for x in scores])
  assert [row["best"] for row in rows] == [False, True, False, True]  # not the unfinished rate
  assert rows[1]["accuracy"] == pytest.approx(0.6)
  assert rows[1]["accuracy std"] == pytest.approx(np.std(high, ddof=1))
  assert (rows[1]["accuracy min"], rows[1]["accuracy max"], rows[2]["seeds"]) == (0.5, 0.8, 2)
  text = (tmp_path / "table.md").read_text()
  assert "| 16 | 11,872 | 0.01 | 0.6000 ± 0.1732 | 7 ± 0 | 3 |" in text
  assert "1 of 12 runs of this table are not finished." in text
  assert json.loads((tmp_path / "table.jsonl").read_text().splitlines()[1]) == rows[1]
  with (tmp_path / "table.csv").open() as file:
    assert [row["best"] for row in csv.DictReader(file)] == ["False", "True", "False", "True"]
  of_runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
  assert [row["finished"] for row in of_runs] == [x is not None for x in scores]
  assert [row["seed"] for row in of_runs] == [0, 1, 2] * 4
  assert [row["learning_rate"] for row in of_runs] == [*[3e-3] * 3, *[1e-2] * 3] * 2
  assert [row.get("accuracy") for row in of_runs] == [x and x["accuracy"] for x in scores]


def test_best_rate_of_text_has_the_smallest_loss(tiny):
  losses = (2.0, 1.5, 1.0, 1.25)
  rows = tables.table(text_runs(tiny), [{"validation loss": loss} for loss in losses])
  assert [row["validation loss"] for row in rows if row["best"]] == [1.125]


def test_rate_at_which_a_seed_diverged_is_not_the_best():
  runs, scores = scored([0.9, None, 0.9, 0.1, 0.1, 0.1, *[0.5] * 6])
  scores[1] = {"accuracy": None}
  rows = tables.table(runs, scores)
  assert [row["best"] for row in rows] == [False, True, True, False]
  assert (rows[0]["diverged"], rows[0]["seeds"]) == (1, 3)
  text = tables.markdown(runs, rows)
  assert text.endswith("\n1 runs diverged; their learning rates are left out.\n")
  assert "not finished" not in text


def test_table_shows_four_digits_of_small_numbers_and_no_deviation_of_one_seed():
  runs, _ = scored([0.5] * 12)
  rows = tables.table([runs[0]], [{"accuracy": 12.34567}])
  assert rows[0]["accuracy std"] is None and rows[0]["accuracy min"] == 12.34567
  assert "| 12.3457 | 1 |" in tables.markdown(runs[:1], rows)
  rows = tables.table(runs[:2], [{"accuracy": 123.4}, {"accuracy": 124.6}])
  assert "| 124 ± 1 | 2 |" in tables.markdown(runs[:2], rows)


def test_plot_draws_the_best_rates_with_their_spread(tmp_path, monkeypatch):
  runs, scores = scored([0.1, 0.2, 0.6, 0.5, 0.5, 0.8, *[0.9] * 3, *[0.3] * 3])
  drawn = []
  from matplotlib.axes import Axes

  errorbar = Axes.errorbar

  def watched(self, x, y, bars, **options):
    drawn.append((x, y, bars))
    return errorbar(self, x, y, bars, **options)

  monkeypatch.setattr(Axes, "errorbar", watched)
  rows = tables.table(runs, scores)
  plots.draw(rows, Plot(x="model.dim"), "accuracy", tmp_path / "a.png")
  ((x, y, (below, above)),) = drawn
  assert x == [16, 32]
  np.testing.assert_allclose([y, below, above], [[0.6, 0.9], [0.1, 0], [0.2, 0]], atol=1e-9)
  assert (tmp_path / "a.png").stat().st_size > 5000
  plots.draw(rows, Plot(line="model.dim"), "accuracy", tmp_path / "b.png")
  first, second = (np.array(x) for x, _, _ in drawn[1:])  # apart, and near their values
  np.testing.assert_allclose([first, second], [[3e-3, 1e-2]] * 2, rtol=0.02)
  assert np.all(first < second)
  drawn.clear()
  plots.draw(rows, Plot(x="model.dim", where={"model.dim": 32}), "accuracy", tmp_path / "a.png")
  plots.draw(rows, Plot(), "accuracy", tmp_path / "b.png")  # a line per value all the same
  assert drawn[0][0] == [32]
  np.testing.assert_allclose([x for x, _, _ in drawn[1:]], [[3e-3, 1e-2]] * 2, rtol=0.02)
  guesses = []
  monkeypatch.setattr(Axes, "axhline", lambda self, y, **options: guesses.append(y))
  chances = Plot(panel="model.dim", chance={None: 0.25, 32: 0.5})
  plots.draw(rows, chances, "accuracy", tmp_path / "a.png")
  assert guesses == [0.25, 0.5]


@pytest.mark.slow
def test_sweep_killed_by_sigkill_resumes_bit_exact(tmp_path, command):
  """The whole command, killed as soon as it has saved."""
  path = tmp_path / "killed.py"
  path.write_text(
    FILE.replace("steps=7", "steps=100").replace("Recall(", "Recall(train_rows=8, test_rows=4, ")
  )
  code = (
    "import sys; from train.sweeps import training; from train.cli.main import main;"
    "training.SAVE_SECONDS = 0.0; sys.exit(main(sys.argv[1:]))"
  )
  arguments = ["sweep", str(path), "--only", "width=16", "--only", "size=a", "--out"]
  place = tmp_path / "parts"
  process = command("-c", code, *arguments, str(place))
  deadline = time.monotonic() + 300
  saved = lambda: [x for x in place.glob("unfinished/*/*") if x.name.isdecimal()]
  while not saved() and time.monotonic() < deadline:
    assert process.poll() is None, process.communicate()[1]
    time.sleep(0.02)
  os.kill(process.pid, signal.SIGKILL)
  process.communicate()
  assert process.returncode == -signal.SIGKILL

  def run(folder):
    process = command("-c", code, *arguments, str(folder))
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out

  assert "resuming after step" in run(place)
  run(tmp_path / "whole")
  one, other = ((tmp_path / name / "runs.jsonl").read_text() for name in ("parts", "whole"))
  assert one.replace(str(place), "") == other.replace(str(tmp_path / "whole"), "")

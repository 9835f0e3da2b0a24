"""Callbacks of a run: when they are called, what they see, and the three that are there."""

import json
import sys

import jax
import numpy as np
import pytest

import train
from train import callbacks, trainer
from train.callbacks import Callback
from train.config import ConfigError
from train.runs.run_folder import RunFolder

SEEN = []


class Noting(Callback):
  def __init__(self, end_at=None):
    self.end_at = end_at

  def started(self, now):
    SEEN.append(("started", now.step, len(now.evaluations)))

  def before_step(self, now):
    self.before = now.step

  def after_step(self, now):
    assert now.step == self.before + 1 and now.metrics["loss"].shape == ()

  def pauses(self, step):
    return step == 9

  def paused(self, now):
    if self.pauses(now.step):
      SEEN.append(("paused", now.step, int(now.state["step"])))

  def evaluated(self, now):
    (row,) = now.evaluations[-1:]
    SEEN.append(("evaluated", now.step, row["step"]))
    return "the test" if now.step == self.end_at else None

  def finished(self, now):
    SEEN.append(("finished", now.step, int(now.state["step"])))


def noting(**options):
  SEEN.clear()
  return Noting(**options)


def wrong():
  return {}["x"]


def not_one():
  return 3


def of(name, **options):
  return {"callbacks": {name: options}}


HERE = f"{__name__}:noting"


def test_callbacks_are_called_at_the_start_each_step_pause_and_evaluation_and_the_end(tiny):
  result = trainer.fit(tiny(**of(HERE)))
  assert result.ended_by is None
  assert SEEN == [
    ("started", 0, 0),
    ("evaluated", 0, 0),
    ("evaluated", 6, 6),
    ("paused", 9, 9),
    ("evaluated", 12, 12),
    ("finished", 12, 12),
  ]


@pytest.mark.slow
def test_callback_that_returns_a_text_ends_the_run_with_its_step_saved(tiny, capsys):
  cfg = tiny(**of(HERE, end_at=6))
  result = trainer.fit(cfg)
  assert (result.step, result.stopped_by, result.ended_by) == (6, None, "the test")
  assert result.validation[0]["step"] == 6
  assert "ended after step 6 by the test" in capsys.readouterr().out
  assert int(train.load_model(cfg.run_dir).step) == 6


@pytest.mark.slow
@pytest.mark.slow
def test_run_without_callbacks_has_the_bits_of_one_with_them(tiny, tmp_path):
  plain = trainer.fit(tiny())
  noted = trainer.fit(tiny(run_dir=str(tmp_path / "other"), **of(HERE)))
  same = jax.tree.map(np.array_equal, plain.state["params"], noted.state["params"])
  assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(
  ("losses", "options", "ends"),
  [
    ([3.0, 2.0, 2.5], {"patience": 1}, True),
    ([3.0, 2.0, 2.5], {"patience": 2}, False),
    ([3.0, 2.0, 2.5, 2.0], {"patience": 2}, True),
    ([3.0, 2.5, 1.9], {"patience": 2}, False),
    ([3.0, 2.9, 2.8], {"patience": 2, "least": 0.5}, True),
    ([3.0, 2.5, 1.5, 1.6], {"patience": 2, "least": 0.5}, False),
    ([], {"patience": 1}, False),
  ],
)
def test_early_stopping_counts_evaluations_since_the_lowest_loss(losses, options, ends, tiny):
  rows = [{"set": "validation", "val_loss": loss} for loss in losses]
  now = callbacks.Moment(6, {}, cfg=tiny(), evaluations=rows)
  stopping = callbacks.early_stopping(**options)
  assert (stopping.evaluated(now) is not None) == ends
  assert (stopping.started(now) is not None) == ends  # after a resume, too


def test_best_checkpoint_opens_as_a_run(tiny, monkeypatch):
  losses = iter([3.0, 1.0, 2.0])  # of steps 0, 6 and 12
  evaluate = trainer.Evaluator.__call__
  monkeypatch.setattr(
    trainer.Evaluator,
    "__call__",
    lambda *given, **more: [row | {"val_loss": next(losses)} for row in evaluate(*given, **more)],
  )
  cfg = tiny(**of("train.callbacks:keep_best"))
  trainer.fit(cfg)
  best = train.load_model(f"{cfg.run_dir}/best")
  assert best.step == 6
  assert [path.name for path in (RunFolder(cfg.run_dir).path / "best/checkpoints").iterdir()] == [
    "6"
  ]


@pytest.mark.slow
def test_texts_and_losses_are_written_at_each_evaluation(tiny, monkeypatch):
  drawn = []
  monkeypatch.setattr(callbacks.plot, "draw", lambda *given: drawn.append(given))
  names = ("sample_texts", "loss_curves")
  cfg = tiny(callbacks={f"train.callbacks:{name}": {} for name in names}, sample__tokens=4)
  trainer.fit(cfg)
  folder = RunFolder(cfg.run_dir).path
  assert drawn == [([folder], folder / "losses.png")] * 3
  text = (RunFolder(cfg.run_dir).path / "samples.txt").read_text(errors="replace")
  assert [f"--- step {step}\nthe " in text for step in (0, 6, 12)] == [True] * 3


def test_run_without_validation_sets_has_one_text_per_evaluation(tiny):
  sets = {"data__validation": (), "data__sources": {"train": tiny().data.sources["train"]}}
  cfg = tiny(**of("train.callbacks:sample_texts"), **sets)
  trainer.fit(cfg)
  text = (RunFolder(cfg.run_dir).path / "samples.txt").read_text(errors="replace")
  assert [line for line in text.splitlines() if line.startswith("---")] == [
    f"--- step {step}" for step in (0, 6, 12)
  ]


@pytest.mark.parametrize(
  ("given", "message"),
  [
    (
      {"nowhere:x": {}},
      "callbacks='nowhere:x' with the options {} cannot be used: No modul",
    ),
    ({f"{__name__}:nothing": {}}, "cannot be used: module .* has no attribute 'nothing'"),
    ({f"{__name__}:wrong": {}}, r"cannot be used: KeyError: 'x' \(test_callbacks.py, line \d+\)"),
    ({f"{__name__}:not_one": {}}, "it returned int, not a train.loop.Callback"),
    ({HERE: {"end": 3}}, "unexpected keyword argument 'end'"),
    ({"train.callbacks:early_stopping": {"patience": 0}}, "patience=0 must be at least 1"),
    ({"train.callbacks:loss_curves": {"file": "x.txt"}}, "file='x.txt' must end in .png, .pdf"),
    ({"early_stopping": {}}, "callbacks has 'early_stopping', which is no MODULE:FUNCTION"),
    (
      {"train.callbacks:keep_best": {"name": "test"}},
      r"the validation set 'test', which is not in data.validation=\['validation'\]",
    ),
  ],
)
def test_wrong_callback_raises_before_training(given, message, tiny):
  with pytest.raises(ConfigError, match=message):
    trainer.fit(tiny(callbacks=given))


@pytest.mark.slow
@pytest.mark.slow
def test_module_of_a_callback_may_be_a_file_of_the_current_folder(tiny, tmp_path, monkeypatch):
  """As a command finds it, whose path has the folder of the program in its place."""
  (tmp_path / "callback_here.py").write_text("from train.loop import Callback as make\n")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr("sys.path", [*sys.path])
  (one,) = callbacks.made(tiny(callbacks={"callback_here:make": {}}))
  assert type(one) is Callback


def test_callbacks_of_a_resumed_run_may_change(tiny, fit_and_kill):
  fit_and_kill(tiny(), at=8)
  cfg = tiny(**of(HERE))
  trainer.fit(cfg)
  assert SEEN[0] == ("started", 5, 1)
  assert json.loads((RunFolder(cfg.run_dir).config_file).read_text())["callbacks"] == {HERE: {}}

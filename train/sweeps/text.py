"""The training of language models as copies, which can be saved whenever it pauses."""

import contextlib
import math
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train import trainer
from train.data.errors import DataError
from train.data.windows import eval_batches, train_batches
from train.runs import evaluation, reference
from train.runs.rows import Row
from train.step.copies import Copies
from train.step.optimizer import make_schedule
from train.sweeps.groups import Group, text_scores
from train.sweeps.work import Scores


class Text:
  """Language models; each copy sees the batches of its seed, as `train.fit` would give it."""

  def __init__(self, group: Group, kernels: Path):
    self._cfg = group.first.cfg
    self.copies = Copies(self._cfg, runs=group.pairs, kernels=kernels)
    self._windows = trainer.training_set(self._cfg)
    self._sets = evaluation.open_sets(self._cfg)
    if reference.pairs_of([self._windows, *self._sets.values()]):
      raise DataError("pairs of answers (three data.fields) are for single runs of `fit`.")
    self._schedule = make_schedule(self._cfg.optimizer, self._cfg.steps)
    self._scores: list[Scores] = []

  def batches(self, start: int) -> Generator[Any]:
    cfg = self._cfg
    options = {"global_batch": cfg.global_batch, "order": cfg.data.order, "start": start}
    with contextlib.ExitStack() as stack:
      streams = {
        seed: stack.enter_context(train_batches(self._windows, seed=seed, **options))
        for seed in dict.fromkeys(seed for seed, _ in self.copies.runs)
      }
      while True:
        of_seed = {seed: next(stream) for seed, stream in streams.items()}
        of_copy = [of_seed[seed] for seed, _ in self.copies.runs]
        yield jax.tree.map(lambda *xs: np.stack(xs), *of_copy)

  @property
  def finished(self) -> bool:
    return bool(self._scores)

  def pauses(self, step: int) -> bool:
    return step % self._cfg.log_every == 0 or self._evaluates(step)

  def _evaluates(self, step: int) -> bool:
    return step % self._cfg.eval_every == 0 or step == self._cfg.steps

  def measure(self, step: int, metrics: Mapping[str, Any]) -> list[list[Row]]:
    now = float(np.asarray(self._schedule(step - 1))) / self._cfg.optimizer.peak_lr
    rows: list[list[Row]] = []
    measured = (np.asarray(metrics[name]).tolist() for name in ("loss", "tokens", "skipped"))
    diverged = self.copies.diverged
    for loss, tokens, skipped, gone, (_, rate) in zip(
      *measured, diverged, self.copies.runs, strict=True
    ):
      row = {"kind": "train", "loss": loss, "learning_rate": now * rate}
      row = {"kind": "diverged"} if gone else row
      is_empty = not tokens or (skipped and not gone)  # what is skipped has no loss to draw
      rows.append([] if is_empty else [{"step": step, **row}])
    if self._evaluates(step):
      evaluated = self._evaluate(step)
      if step == self._cfg.steps:
        self._scores = [
          dict.fromkeys(text_scores(of_run)) if gone else text_scores(of_run)
          for of_run, gone in zip(evaluated, diverged, strict=True)
        ]
      for mine, more, gone in zip(rows, evaluated, diverged, strict=True):
        mine += [] if gone else [row for row in more if math.isfinite(row["val_loss"])]
    return rows

  def _evaluate(self, step: int) -> list[list[Row]]:
    """The rows of each copy for each validation set."""
    rows: list[list[Row]] = [[] for _ in self.copies.runs]
    size = self._cfg.global_batch // self._cfg.accumulate
    for name, source in self._sets.items():
      batches = eval_batches(source, size, count=evaluation.count_of(self._cfg, source))
      sums = jax.device_get([self.copies.loss(batch) for batch in batches])
      for copy, of_run in enumerate(rows):
        nats, weight = (
          math.fsum(float(getattr(each, key)[copy]) for each in sums) for key in ("nats", "weight")
        )
        of_run.append(evaluation.row_of(self._cfg, name, source, step, nats, weight))
    return rows

  def scores(self) -> list[Scores]:
    return self._scores

  def position(self, step: int) -> dict[str, Any]:
    return {"step": step}

  def restore(self, position: Mapping[str, Any]) -> None:
    del position  # everything is a function of the step

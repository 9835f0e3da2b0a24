"""Training on rows with answers: the accuracy of a config by learning rate and seed.

Published protocol (Zoology, section 4 and its code): a fixed set of training rows, read in the same
order in each epoch; the accuracy on test rows of another seed after each epoch; a copy stops above
an accuracy of 0.99, and the best learning rate counts. Two differences: the learning rate follows
`cfg.optimizer` per step (published: a cosine, constant within an epoch), and rows that fill no
batch are left out.
"""

import dataclasses
import io
import itertools
import math
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from experiments.mqar import MQAR, Examples
from lnssm_jax.files.atomic import replace_file
from train import config, loop
from train.config.checked import check
from train.data.errors import writing
from train.loop import Moment
from train.runs.rows import Row
from train.scoring.report import Report
from train.step.copies import Copies
from train.step.model import check_length
from train.sweeps.work import Measuring, Scores

LEARNING_RATES = (1e-4, 4.6e-4, 2.2e-3, 1e-2)
TEST_SEEDS = 2**31  # rows to test on have the seed of those to train on plus this
SOLVED = 0.99  # a copy above this accuracy is not trained further
SAY_SECONDS = 10.0  # between two lines of progress within an epoch, at least


class Task(Protocol):
  """A task whose rows have answers: `MQAR`, `ListOps` or `Pixels`, a dataclass of its settings."""

  name: ClassVar[str]
  __dataclass_fields__: ClassVar[dict[str, Any]]

  def examples(self, rows: int, seed: int) -> Examples:
    """Rows, the same for the same seed; those to train on have seeds below 2**31."""
    ...


def check_vocabulary(cfg: config.Train, size: int) -> None:
  """Raises ConfigError if the model's vocabulary does not hold that of a task."""
  most = cfg.model.vocab_size
  check(
    size <= most,
    f"vocab_size={size} of the task is larger than model.vocab_size={most}; use a smaller one, or"
    f" --set model.vocab_size={size}.",
  )


def check_rows(cfg: config.Train, **rows: int) -> None:
  """Raises ConfigError if there are fewer rows, by name, than a batch has."""
  for name, count in rows.items():
    check(
      count >= cfg.global_batch,
      f"{name}={count} is less than global_batch={cfg.global_batch}; use more, or --set"
      f" global_batch={count}.",
    )


def task_of(
  cfg: config.Train,
  *,
  pairs: int,
  vocab_size: int | None = None,
  power: float = 0.01,
  random_fillers: bool = False,
) -> MQAR:
  """The task of rows of `cfg.seq_len` tokens, by default of the model's whole vocabulary.

  Raises:
    ConfigError: the model's vocabulary does not hold the task's.
    ValueError: as `MQAR`.
  """
  if vocab_size is not None:
    check_vocabulary(cfg, vocab_size)
  return MQAR(
    length=cfg.seq_len,
    pairs=pairs,
    vocab_size=vocab_size or cfg.model.vocab_size,
    power=power,
    random_fillers=random_fillers,
  )


def write(task: Task, path: Path, *, train_rows: int, test_rows: int, data_seed: int = 0) -> None:
  """Writes the data as .npz: tokens and labels [rows, T] int32, -100 where nothing is asked for.

  Raises:
    DataError: the file cannot be written.
  """
  arrays = {}
  for name, rows, seed in (("train", train_rows, 0), ("test", test_rows, TEST_SEEDS)):
    examples = task.examples(rows, seed + data_seed)
    arrays |= {f"{name}_tokens": examples.tokens, f"{name}_labels": examples.labels()}
  content = io.BytesIO()
  np.savez_compressed(content, **arrays)
  with writing(path):
    replace_file(path, content.getvalue())


class Training:
  """Copies that learn a task, measured after each epoch (`train.sweeps.work.Work`).

  They train for at most `cfg.steps` steps of `cfg.global_batch` rows, and until all seeds of a
  learning rate have solved the task.

  Args:
    data_seed: of the rows, below 2**31; the copies have their own seeds.
    validation_rows: of a third seed, that end a copy and choose its rate, so that the rows to test
      on only give their `test accuracy`; 0: these do it.

  Attributes:
    step: finished steps, as last measured.
    accuracy: float64 [R] of each copy, of the last evaluation, or of the first above 0.99; NaN of
      one that has diverged (`Copies.diverged`).
    steps: [R], when that was.
    tested: float64 [R] of each copy, when that was, on rows that chose nothing; None without.
    train, test, validation: the batches.

  Raises:
    ConfigError: there are fewer rows than a batch has, or they are longer than the model's
      positions or a cache hold.
  """

  def __init__(
    self,
    cfg: config.Train,
    task: Task,
    copies: Copies,
    *,
    train_rows: int,
    test_rows: int,
    data_seed: int = 0,
    validation_rows: int = 0,
  ):
    check_rows(cfg, train_rows=train_rows, test_rows=test_rows)
    check_length(cfg.model, "seq_len", cfg.seq_len)
    self.copies, self._most = copies, cfg.steps
    self.train, self.test = (_batches(task.examples(*of), cfg.global_batch) for of in (
      (train_rows, data_seed), (test_rows, data_seed + TEST_SEEDS)
    ))  # fmt: skip
    self.validation, self.tested = list[Examples](), None
    if validation_rows:
      check_rows(cfg, validation_rows=validation_rows)
      examples = task.examples(validation_rows, data_seed + 2 * TEST_SEEDS)
      self.validation = _batches(examples, cfg.global_batch)
      self.tested = np.zeros(len(copies.runs))
    self.step = 0
    self.accuracy = np.zeros(len(copies.runs))
    self.steps = np.zeros(len(copies.runs), int)

  @property
  def finished(self) -> bool:
    """Whether all steps are done, or all seeds of a learning rate have solved the task."""
    of_rate: dict[float, list[bool]] = {}
    for (_, rate), accuracy in zip(self.copies.runs, self.accuracy, strict=True):
      of_rate.setdefault(rate, []).append(bool(accuracy > SOLVED))
    return self.step >= self._most or any(map(all, of_rate.values()))

  def batches(self, start: int) -> Generator[dict[str, Any]]:
    for step in itertools.count(start):
      yield self.train[step % len(self.train)]._asdict()

  def pauses(self, step: int) -> bool:
    return step % len(self.train) == 0 or step == self._most

  def measure(self, step: int, metrics: Any = None) -> list[list[Row]]:
    """Evaluates the copies; returns the rows of metrics.jsonl of each."""
    del metrics
    right = self._right(self.validation or self.test)
    running, self.step = self.accuracy <= SOLVED, step
    if self.tested is not None:
      self.tested = np.where(running, self._right(self.test), self.tested)
    self.accuracy = np.where(running, right, self.accuracy)
    self.steps = np.where(running, step, self.steps)
    rows = []
    for scores in self.scores():
      row = {"kind": "diverged"} if scores["accuracy"] is None else {"kind": "task", **scores}
      rows.append([{"step": step, **row}])
    return rows

  def _right(self, batches: Sequence[Examples]) -> np.ndarray:
    right = np.mean([self.copies.right(examples._asdict()) for examples in batches], axis=0)
    return np.where(self.copies.diverged, np.nan, right)

  def scores(self) -> list[Scores]:
    """Accuracy, None of a copy that has diverged, and steps."""
    pairs = zip(self.accuracy, self.steps, strict=True)
    scores = [{"accuracy": accuracy_of(right), "steps": int(steps)} for right, steps in pairs]
    tested = [] if self.tested is None else [{"test accuracy": accuracy_of(x)} for x in self.tested]
    return [of | more for of, more in zip(scores, tested or [{}] * len(scores), strict=True)]

  def position(self, step: int) -> dict[str, Any]:
    """All but the state of the copies, as JSON."""
    accuracy = [accuracy_of(x) for x in self.accuracy]
    tested = {} if self.tested is None else {"tested": [accuracy_of(x) for x in self.tested]}
    return {"step": step, "accuracy": accuracy, "steps": self.steps.tolist(), **tested}

  def restore(self, position: Mapping[str, Any]) -> None:
    """Takes a result of `position`; the state of the copies is the caller's."""
    self.step = position["step"]
    self.accuracy = np.asarray(position["accuracy"], float)  # None becomes NaN
    self.steps = np.asarray(position["steps"])
    if self.tested is not None:
      self.tested = np.asarray(position["tested"], float)


class _Progress(Measuring):
  """Says the best accuracy so far."""

  def measured(self, now: Moment, rows: list[list[Row]]) -> None:
    best = max(row.get("accuracy", 0) for (row,) in rows)
    now.say(f"step {now.step:,} of at most {self._steps:,}: accuracy {best:.4f} at best")


def run(
  cfg: config.Train,
  task: Task,
  *,
  learning_rates: Sequence[float] = LEARNING_RATES,
  seeds: Sequence[int] = (0, 1, 2),
  train_rows: int = 100_000,
  test_rows: int = 3_000,
  data_seed: int = 0,
  progress: Callable[[str], object] = lambda line: None,
) -> Report:
  """Trains copies of the model for all seeds and learning rates; see `Training`.

  Raises:
    ConfigError: as `Training`.
  """
  copies = Copies(cfg, seeds=seeds, learning_rates=learning_rates)
  rows = {"train_rows": train_rows, "test_rows": test_rows, "data_seed": data_seed}
  training = Training(cfg, task, copies, **rows)
  progress(f"{len(copies.runs)} copies, {len(training.train):,} steps an epoch; compiling")
  now = Moment(0, copies.state, [_Progress(training, cfg.steps, SAY_SECONDS)], say=progress)
  loop.train(now, copies.advance, training.batches(0), steps=cfg.steps)
  runs = [
    {"learning_rate": rate, "seed": seed, **scores}
    for (seed, rate), scores in zip(copies.runs, training.scores(), strict=True)
  ]
  means = [_over_seeds(rate, runs) for rate in learning_rates]
  settings = {
    "mixer": cfg.model.mixer,
    "dim": cfg.model.dim,
    "layers": cfg.model.num_layers,
    **dataclasses.asdict(task),
    "batch": cfg.global_batch,
    "train_rows": len(training.train) * cfg.global_batch,
    "test_rows": len(training.test) * cfg.global_batch,
    "data_seed": data_seed,
    "seeds": list(seeds),
  }
  best = sorted((row for row in means if not row["diverged"]), key=lambda row: -row["accuracy"])
  return Report(task.name, settings, {"learning rates": means, "best": best[:1]}, {"runs": runs})


def accuracy_of(value: float) -> float | None:
  """An accuracy of `Training` as JSON, None for a copy that has diverged."""
  return None if math.isnan(value) else float(value)


def _batches(examples: Examples, size: int) -> list[Examples]:
  firsts = range(0, len(examples.tokens) - size + 1, size)
  return [Examples(*(array[first : first + size] for array in examples)) for first in firsts]


def _over_seeds(rate: float, runs: Sequence[dict]) -> dict:
  """Mean, standard deviation of a sample, least and largest accuracy of a learning rate.

  They are None if a copy of it has diverged, the deviation of one seed, too.
  """
  of_rate = [run for run in runs if run["learning_rate"] == rate]
  values = [run["accuracy"] for run in of_rate]
  diverged = values.count(None)
  known = [] if diverged else values
  return {
    "learning_rate": rate,
    "accuracy": statistics.fmean(known) if known else None,
    "std": statistics.stdev(known) if len(known) > 1 else None,
    "min": min(known, default=None),
    "max": max(known, default=None),
    "steps": max(run["steps"] for run in of_rate),
    "diverged": diverged,
  }

"""Training on multi-query associative recall: the accuracy of a config by learning rate and seed.

Published protocol (Zoology, section 4 and its code): a fixed set of training rows, read in the same
order in each epoch; the accuracy on test rows of another seed after each epoch; a copy stops above
an accuracy of 0.99, and the best learning rate counts. Two differences: the learning rate follows
`cfg.optimizer` per step (published: a cosine, constant within an epoch), and rows that fill no
batch are left out.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from train import config
from train.config.checked import check
from train.tasks.copies import Copies
from train.tasks.mqar import MQAR, Examples
from train.tasks.report import Report

LEARNING_RATES = (1e-4, 4.6e-4, 2.2e-3, 1e-2)
TRAIN_SEED, TEST_SEED = 0, 2**31
SOLVED = 0.99  # a copy above this accuracy is not trained further


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
  size, most = vocab_size, cfg.model.vocab_size
  check(
    size is None or size <= most,
    f"vocab_size={size} of the task is larger than model.vocab_size={most}; use a smaller one, or"
    f" --set model.vocab_size={size}.",
  )
  return MQAR(
    length=cfg.seq_len,
    pairs=pairs,
    vocab_size=size or most,
    power=power,
    random_fillers=random_fillers,
  )


def write(task: MQAR, path: Path, *, train_rows: int, test_rows: int) -> None:
  """Writes the data as .npz: tokens and labels [rows, T] int32, -100 where nothing is asked for."""
  arrays = {}
  for name, rows, seed in (("train", train_rows, TRAIN_SEED), ("test", test_rows, TEST_SEED)):
    examples = task.examples(rows, seed)
    arrays |= {f"{name}_tokens": examples.tokens, f"{name}_labels": examples.labels()}
  np.savez_compressed(path, **arrays)


def run(
  cfg: config.Train,
  task: MQAR,
  *,
  learning_rates: Sequence[float] = LEARNING_RATES,
  seeds: Sequence[int] = (0, 1, 2),
  train_rows: int = 100_000,
  test_rows: int = 3_000,
  progress: Callable[[str], object] = lambda line: None,
) -> Report:
  """Trains copies of the model for at most `cfg.steps` steps of `cfg.global_batch` rows.

  Stops early when all seeds of a learning rate have solved the task. `accuracy` is that of the last
  evaluation, or of the first above 0.99.

  Raises:
    ConfigError: there are fewer rows than a batch has.
  """
  batch = cfg.global_batch
  for name, rows in (("train", train_rows), ("test", test_rows)):
    check(
      rows >= batch,
      f"{rows} {name} rows are less than global_batch={batch}; use more, or --set global_batch=.",
    )
  copies = Copies(cfg, seeds=seeds, learning_rates=learning_rates)
  train, test = (_batches(task.examples(*of), batch) for of in (
    (train_rows, TRAIN_SEED), (test_rows, TEST_SEED)
  ))  # fmt: skip
  shape = (len(seeds), len(learning_rates))
  accuracy, steps = np.zeros(len(copies.runs)), np.zeros(len(copies.runs), int)
  step = 0
  while step < cfg.steps and not (accuracy > SOLVED).reshape(shape).all(axis=0).any():
    epoch = train[: cfg.steps - step]
    for examples in epoch:
      copies.step(examples._asdict())
    step += len(epoch)
    right = np.mean([copies.right(examples._asdict()) for examples in test], axis=0)
    running = accuracy <= SOLVED
    accuracy, steps = np.where(running, right, accuracy), np.where(running, step, steps)
    progress(f"step {step:,} of {cfg.steps:,}: accuracy {accuracy.max():.4f} at best")
  runs = [
    {"learning_rate": rate, "seed": seed, "accuracy": float(accuracy[i]), "steps": int(steps[i])}
    for i, (seed, rate) in enumerate(copies.runs)
  ]
  means = [_over_seeds(rate, runs) for rate in learning_rates]
  settings = {
    "mixer": cfg.model.mixer,
    "dim": cfg.model.dim,
    "layers": cfg.model.num_layers,
    "length": task.length,
    "pairs": task.pairs,
    "vocab_size": task.vocab_size,
    "power": task.power,
    "random_fillers": task.random_fillers,
    "batch": batch,
    "train_rows": len(train) * batch,
    "test_rows": len(test) * batch,
    "seeds": list(seeds),
  }
  best = max(means, key=lambda row: row["accuracy"])
  return Report("mqar", settings, {"learning rates": means, "best": [best]}, {"runs": runs})


def _batches(examples: Examples, size: int) -> list[Examples]:
  firsts = range(0, len(examples.tokens) - size + 1, size)
  return [Examples(*(array[first : first + size] for array in examples)) for first in firsts]


def _over_seeds(rate: float, runs: Sequence[dict]) -> dict:
  """Mean, standard deviation, least and largest accuracy of a learning rate."""
  of_rate = [run for run in runs if run["learning_rate"] == rate]
  values = [run["accuracy"] for run in of_rate]
  return {
    "learning_rate": rate,
    "accuracy": float(np.mean(values)),
    "std": float(np.std(values)),
    "min": min(values),
    "max": max(values),
    "steps": max(run["steps"] for run in of_rate),
  }

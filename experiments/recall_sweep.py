"""Multi-query associative recall as the task of a sweep. JAX is imported when it is trained."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from train import config
from train.config.checked import at_least, settings
from train.sweeps import Run, Task

if TYPE_CHECKING:
  from experiments.mqar import MQAR
  from experiments.mqar_training import Training


@settings
class Recall(Task):
  """Multi-query associative recall as the task of a run (`experiments.mqar_training`).

  Rows have `seq_len` tokens of the config, and `global_batch` of them are a batch. The score is the
  accuracy; without a task a run is a language model, whose score is its validation loss.
  """

  pairs: int
  train_rows: int = 100_000
  test_rows: int = 3_000
  validation_rows: int = 0  # that choose and stop in place of those to test on
  power: float = 0.01
  random_fillers: bool = False
  vocab_size: int | None = None  # None: the model's

  score: ClassVar[str] = "accuracy"
  sign: ClassVar[int] = 1

  def __post_init__(self):
    for name in ("pairs", "train_rows", "test_rows"):
      at_least(f"recall.{name}", getattr(self, name), 1)

  @property
  def rows(self) -> dict[str, int]:
    """Its numbers of rows, by name."""
    names = ("train_rows", "test_rows", *(("validation_rows",) if self.validation_rows else ()))
    return {name: getattr(self, name) for name in names}

  def rows_of(self, cfg: config.Train) -> "MQAR":
    """The rows of a run.

    Raises:
      ValueError: they do not fit the run's settings, or are fewer than a batch.
    """
    from experiments import mqar_training  # imports JAX

    given = dict(vars(self))
    for name in ("train_rows", "test_rows", "validation_rows"):
      del given[name]
    mqar_training.check_rows(cfg, **self.rows)
    return mqar_training.task_of(cfg, **given)

  def check(self, cfg: config.Train) -> None:
    self.rows_of(cfg)

  def targets(self, cfg: config.Train) -> int:
    return self.pairs

  def batch(self, cfg: config.Train) -> dict[str, Any]:
    return self.rows_of(cfg).examples(cfg.global_batch, seed=0)._asdict()

  def work(self, runs: Sequence[Run], kernels: Path) -> "Training":
    from experiments.mqar_training import Training
    from train.step.copies import Copies
    from train.sweeps.groups import Group

    cfg = runs[0].cfg
    copies = Copies(cfg, runs=Group(runs).pairs, kernels=kernels)
    return Training(cfg, self.rows_of(cfg), copies, **self.rows)

"""Copies in training, whatever they learn: the protocol that a sweep needs, and their scores."""

import time
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from train.loop import Callback, Moment
from train.runs.rows import Row

if TYPE_CHECKING:
  from train.step.copies import Copies

Scores = dict[str, float | None]  # by name; None: the run diverged


class Work(Protocol):
  """Copies in training: their batches, and what is measured when training pauses."""

  copies: "Copies"

  @property
  def finished(self) -> bool:
    """Whether there are scores."""
    ...

  def batches(self, start: int) -> Generator[Any]:
    """The batches of steps start + 1, start + 2, ..."""
    ...

  def pauses(self, step: int) -> bool:
    """Whether `measure` follows this step."""
    ...

  def measure(self, step: int, metrics: Mapping[str, Any]) -> list[list[Row]]:
    """Evaluates the copies after a step; returns the rows of metrics.jsonl of each run."""
    ...

  def scores(self) -> list[Scores]:
    """Of each run, as last measured."""
    ...

  def position(self, step: int) -> dict[str, Any]:
    """All but the state of the copies after a step, as JSON, with `step`."""
    ...

  def restore(self, position: Mapping[str, Any]) -> None:
    """Takes a result of `position`."""
    ...


class Measuring(Callback):
  """Measures copies where their work pauses, until it has scores; says how far it is.

  Args:
    steps: at most.
    seconds: between two lines, at least.
  """

  def __init__(self, work: Work, steps: int, seconds: float):
    self._work, self._steps, self._seconds = work, steps, seconds
    self._said = time.monotonic()

  def after_step(self, now: Moment) -> None:
    if time.monotonic() - self._said >= self._seconds:
      self._said = time.monotonic()
      now.say(f"step {now.step:,} of at most {self._steps:,}")

  def pauses(self, step: int) -> bool:
    return self._work.pauses(step)

  def paused(self, now: Moment) -> str | None:
    self.measured(now, self._work.measure(now.step, now.metrics))
    return "its scores" if self._work.finished else None

  def measured(self, now: Moment, rows: list[list[Row]]) -> None:
    """Takes the rows of each run."""

"""Copies in training, whatever they learn: the protocol that a sweep needs, and their scores."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from train.runs.rows import Row

if TYPE_CHECKING:
  from train.step.copies import Copies

Scores = dict[str, float | None]  # by name; None: the run diverged


class Work(Protocol):
  """Copies in training."""

  copies: "Copies"

  @property
  def step(self) -> int:
    """Finished steps."""
    ...

  @property
  def finished(self) -> bool:
    """Whether there are scores."""
    ...

  def advance(self) -> list[list[Row]]:
    """Trains a stretch; returns the rows of metrics.jsonl of each run."""
    ...

  def scores(self) -> list[Scores]:
    """Of each run, after the last stretch."""
    ...

  def position(self) -> dict[str, Any]:
    """All but the state of the copies, as JSON."""
    ...

  def restore(self, position: Mapping[str, Any]) -> None:
    """Continues at a result of `position`."""
    ...

"""The loop of training, whatever is trained: logging, evaluation and saving are its callbacks.

    now = Moment(step=0, state=state, callbacks=[logging, evaluation, saving])
    train(now, step, batches, steps=1000)

`train.trainer` has the callbacks of a language model, after those that its config names
(`train.callbacks`); `train.sweeps` has those of copies.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from train.messages import Say, show
from train.runs.rows import Row


class DivergedError(FloatingPointError):
  """Training cannot continue; `weights_are_good` tells whether its parameters are usable."""

  exit_code = 3  # of the command line: starting again would diverge again

  def __init__(self, message: str, *, weights_are_good: bool = False):
    super().__init__(message)
    self.weights_are_good = weights_are_good


@dataclasses.dataclass
class Moment:
  """A run after a step, as its callbacks see it; the next step changes it.

  Attributes:
    step: finished steps.
    state: the training state; the next step overwrites its arrays, so keep copies of them only.
    callbacks: they are called in this order.
    stop: whether something else ends the run, such as a signal.
    cfg: the settings.
    graph: the static part of the model, for `nnx.merge(graph, state["params"])`.
    path: the run folder.
    evaluations: rows of all evaluations so far, with `step`, `set`, `val_loss`.
    metadata: of a checkpoint of this step.
    say: prints a line of the log.
    metrics: of the last step, still on the device: who reads them waits for that step.
    waited: seconds that the last step waited for its batch.
    ended_by: what a callback returned that ended the run.
  """

  step: int
  state: Any
  callbacks: Sequence["Callback"] = ()
  _: dataclasses.KW_ONLY
  stop: Callable[[], object] = lambda: False
  cfg: Any = None
  graph: Any = None
  path: Path = Path()
  evaluations: list[Row] = dataclasses.field(default_factory=list)
  metadata: Callable[[], dict[str, Any]] = dict
  say: Say = show
  metrics: Any = None
  waited: float = 0.0
  ended_by: str | None = None

  @property
  def stopping(self) -> bool:
    """Whether no other step follows, although the run may have more."""
    return self.ended_by is not None or bool(self.stop())

  def call(self, method: str) -> None:
    """Calls a method of every callback."""
    for each in self.callbacks:
      self.ended_by = getattr(each, method)(self) or self.ended_by


class Callback:
  """Does nothing; a callback overrides what it needs. A text that a method returns ends the run."""

  def started(self, now: Moment) -> str | None:
    """Called before the first step of a run, or of a part of it after a resume."""

  def before_step(self, now: Moment) -> str | None:
    """Called before each step and its batch."""

  def after_step(self, now: Moment) -> str | None:
    """Called once a step is dispatched: the device may still compute it."""

  def pauses(self, step: int) -> bool:
    """Whether training pauses after this step, to evaluate or save: then all have `paused`."""
    return False

  def paused(self, now: Moment) -> str | None:
    """Called after a step for which `pauses` is true in any callback."""

  def evaluated(self, now: Moment) -> str | None:
    """Called after each evaluation, whose rows are the last of `now.evaluations`."""

  def ended(self, now: Moment) -> str | None:
    """Called after the last step, or after the one at which the run was stopped."""

  def diverged(self, now: Moment) -> str | None:
    """Called when a callback ended the run by `DivergedError`, if the parameters are usable."""

  def finished(self, now: Moment) -> str | None:
    """Called after the last step, when it is saved; not in a run that was stopped."""


def train(
  now: Moment, step: Callable[[Any, Any], tuple[Any, Any]], batches: Iterator[Any], *, steps: int
) -> None:
  """Trains `now.state` until `steps`, or until a callback or `now.stop` ends the run.

  Args:
    step: (state, batch) -> (state, metrics).
    batches: of the steps after `now.step`.

  Raises:
    DivergedError: a callback found that training cannot continue.
  """
  now.call("started")
  try:
    while now.step < steps and not now.stopping:
      now.call("before_step")
      begin = time.perf_counter()
      batch = next(batches, None)
      if batch is None:  # the run was stopped while it waited for one
        break
      now.waited = time.perf_counter() - begin
      now.state, now.metrics = step(now.state, batch)
      now.step += 1
      now.call("after_step")
      if any(each.pauses(now.step) for each in now.callbacks):
        now.call("paused")
  except DivergedError as error:
    if error.weights_are_good:
      now.call("diverged")
    raise
  now.call("ended")

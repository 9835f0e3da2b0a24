"""Schedule of checkpoints, and retries of failed saves while training continues."""

import time
from collections.abc import Callable
from typing import Any

from train.checkpoint.store import CheckpointError, Checkpoints
from train.cluster import distributed
from train.loop import Callback, Moment
from train.messages import Say
from train.step.state import State

PAUSES = (1, 2, 4)  # seconds between attempts to save the final checkpoint


class Saver(Callback):
  """Saves a run every `every` steps and at the end; retries failed saves sooner.

  After a failure the next save is attempted after 2 steps, then 4, 8, ... at most `every`, with the
  state of that step. With several processes all learn of a failure after the same step
  (`train.cluster.distributed.ballot`) and retry together.

  Args:
    start: step whose state needs no saving.
    metadata: returns that of a step.
    check: called before each save; what it raises ends the run.
    failed: whether any process had `failed` before a step; None: there is one process.

  Attributes:
    failed: whether a save was found to have failed before this step.
  """

  def __init__(
    self,
    checkpoints: Checkpoints,
    *,
    every: int,
    start: int,
    metadata: Callable[[int], dict[str, Any]],
    say: Say,
    check: Callable[[], object] = lambda: None,
    failed: Callable[[], bool] | None = None,
  ):
    self._checkpoints, self._every, self._metadata, self._say = checkpoints, every, metadata, say
    self._check, self._failed_anywhere = check, failed or (lambda: self.failed)
    self.failed = False
    self._saved: int | None = start  # step whose state has been or is being written
    self._retry_at: int | None = None
    self._failures = 0  # consecutive

  def pauses(self, step: int) -> bool:
    return step % self._every == 0 or step == self._retry_at

  def before_step(self, now: Moment) -> None:
    error = self._checkpoints.failure()
    if error is not None:
      self._say(str(error))
    elif self._saved is not None and self._checkpoints.idle():
      self._failures = 0
    self.failed = error is not None

  def after_step(self, now: Moment) -> None:
    if self._failed_anywhere():
      self._failures += 1
      self._retry_at = now.step + min(2**self._failures, self._every)
      self._saved = None
      self._say(f"training continues; the next save is attempted after step {self._retry_at}")

  def paused(self, now: Moment) -> None:
    if self.pauses(now.step):
      self._check()
      self.save(now.step, now.state)

  def ended(self, now: Moment) -> None:
    self._check()
    self.finish(now.step, now.state)

  def diverged(self, now: Moment) -> None:
    self.finish(now.step, now.state)

  def save(self, step: int, state: State) -> None:
    """Starts writing the state after `step`, unless already done."""
    if self._saved != step:
      self._retry_at = None
      self._checkpoints.save(step, state, self._metadata(step))
      self._saved = step

  def finish(self, step: int, state: State) -> None:
    """Writes the state after `step`, with several attempts, and waits until it is on disk.

    Raises:
      CheckpointError: all attempts failed.
    """
    for pause in (*PAUSES, None):
      self.save(step, state)
      error = None
      try:
        self._checkpoints.wait()
      except CheckpointError as failure:
        error = failure
      if not distributed.any_of(error is not None):
        return
      error = error or CheckpointError(f"another process could not save step {step}")
      if pause is None:
        raise error
      self._say(f"{error} Retrying in {pause} s.")
      time.sleep(pause)
      self._saved = None

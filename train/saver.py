"""When checkpoints are due, and what happens when one cannot be written: training goes on."""

import time
from collections.abc import Callable
from typing import Any

from train import distributed
from train.checkpoint import CheckpointError, Checkpoints
from train.step import State
from train.step_folders import Say

PAUSES = (1, 2, 4)  # seconds before the last checkpoint of a run is tried again


class Saver:
  """Saves a run every `every` steps, after a failure sooner, and at the end.

  A save that failed is tried again after 2 steps, then 4, 8, ... at most `every`; what is written
  then is the state of that step. With several processes all of them learn of a failure after the
  same step (`train.distributed.ballot`), so all of them try again together.
  """

  def __init__(
    self,
    checkpoints: Checkpoints,
    *,
    every: int,
    start: int,
    metadata: Callable[[int], dict[str, Any]],
    say: Say,
  ):
    self._checkpoints, self._every, self._metadata, self._say = checkpoints, every, metadata, say
    self._saved: int | None = start  # the step whose state is written, or being written
    self._retry_at: int | None = None
    self._failures = 0  # one after another

  def is_due(self, step: int) -> bool:
    """Whether `save` should be called after this step."""
    return step % self._every == 0 or step == self._retry_at

  def save(self, step: int, state: State) -> None:
    """Starts to write the state after `step`, unless that has been done."""
    if self._saved != step:
      self._retry_at = None
      self._checkpoints.save(step, state, self._metadata(step))
      self._saved = step

  def failed_here(self) -> bool:
    """Whether a save was found to have failed in this process, since the last call."""
    error = self._checkpoints.failure()
    if error is not None:
      self._say(str(error))
    elif self._saved is not None and self._checkpoints.idle():
      self._failures = 0
    return error is not None

  def retry(self, step: int) -> None:
    """Plans another save, now that one is known to have failed, `step` steps being done."""
    self._failures += 1
    self._retry_at = step + min(2**self._failures, self._every)
    self._saved = None
    self._say(f"training goes on; the next checkpoint is tried after step {self._retry_at}")

  def finish(self, step: int, state: State) -> None:
    """Writes the state after `step`, with some patience, and waits until it is on disk.

    Raises:
      CheckpointError: it could not be written.
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
      self._say(f"{error} Trying again in {pause} s.")
      time.sleep(pause)
      self._saved = None

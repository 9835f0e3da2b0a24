"""Training throughput and remaining time."""

import time


class Clock:
  """Measures tokens per second between readings and estimates the remaining time, in seconds."""

  def __init__(self, tokens_per_step: int):
    self._tokens_per_step = tokens_per_step
    self._steps_done = 0
    self._reading = 0.0, 0.0
    self.restart()

  def restart(self) -> None:
    """Discards the current interval, which included evaluation, saving or the start of the run."""
    self._since = self._last = time.perf_counter()
    if not self._steps_done:
      self._begin = self._since
    self._steps = 0
    self._waited = 0.0

  def tick(self, when: float) -> None:
    """Counts a step that finished at `when`, a value of `time.perf_counter()`."""
    self._last = max(self._last, when)
    self._steps += 1
    self._steps_done += 1

  def waited(self, seconds: float) -> None:
    """Adds time spent waiting for a batch."""
    self._waited += seconds

  def read(self) -> tuple[float, float]:
    """Tokens per second, and the fraction of the time spent waiting, 0 to 1.

    From the last reading or `restart` to the last step. A step that has no time of its own, because
    another was seen to finish no earlier, repeats the reading before and counts in the next one.
    """
    spent = self._last - self._since
    if spent > 0:
      rate = self._steps * self._tokens_per_step / spent
      self._reading = rate, min(1.0, self._waited / spent)
      self._since, self._steps, self._waited = self._last, 0, 0.0
    return self._reading

  def seconds_left(self, steps_left: int) -> float:
    """Estimate from the mean over this process, including evaluations and checkpoints."""
    return steps_left * (self._last - self._begin) / max(self._steps_done, 1)

"""Profiler traces of a few steps: planned, or asked for while a run goes on.

    python -m train fit --config FILE --profile 100:104
    echo 5 > RUN/profile        the next 5 steps, after which the file is removed

They lie in RUN/traces/START-STOP, for TensorBoard's profile page or xprof. With several processes
the first one's devices are traced. A file asks, not a signal: a signal would end a process that is
not ready for it, and would have to reach one process of many.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from train import distributed
from train.settings import check

_MOST = 1000  # steps; a trace of more is too large to be opened
_LOOK_EVERY = 1.0  # seconds


def steps_of(text: str) -> range:
  """The steps of "START:STOP", both included.

  Raises:
    ConfigError: it is not such a text, or too many steps.
  """
  found = re.fullmatch(r"(\d{1,12}):(\d{1,12})", text, re.ASCII)
  steps = range(int(found[1]), int(found[2]) + 1) if found else range(0)
  check(
    0 < len(steps) <= _MOST and steps[0] > 0,
    f"--profile {text} wants START:STOP, two steps of which the second is not the smaller, at most "
    f"{_MOST} steps; for example --profile 100:104.",
  )
  return steps


class Tracer:
  """Starts and stops the profiler around steps. What goes wrong is told, and training goes on."""

  def __init__(self, run: Path, steps: range | None, say: Callable[[str], object]):
    self._request, self._traces = run / "profile", run / "traces"
    self._steps, self._say = steps, say
    self._running: range | None = None
    self._looked = 0.0
    self._is_first = distributed.is_first()

  def before(self, step: int) -> None:
    """To be called before `step` is dispatched."""
    if not self._is_first or self._running:
      return
    asked = self._asked()
    if asked:
      self._start(range(step, step + asked))
    elif self._steps and step in self._steps:
      self._start(range(step, self._steps.stop))
      self._steps = None

  def after(self, step: int, metrics: Any) -> None:
    """To be called when `step` was dispatched; waits for it if it is the last to be traced."""
    if self._running and step >= self._running[-1]:
      jax.block_until_ready(metrics)
      self.close()

  def close(self) -> None:
    """Ends the trace that is running, if any."""
    steps, self._running = self._running, None
    if steps:
      try:
        jax.profiler.stop_trace()
        self._say(f"traced steps {steps[0]} to {steps[-1]}: {self._folder(steps)}")
      except Exception as error:
        self._complain(error)

  def _start(self, steps: range) -> None:
    try:
      jax.profiler.start_trace(self._folder(steps))
      self._running = steps
    except Exception as error:
      self._complain(error)

  def _folder(self, steps: range) -> str:
    return str(self._traces / f"{steps[0]}-{steps[-1]}")

  def _asked(self) -> int:
    """How many steps the file asks for; it is removed once it could be read."""
    now = time.monotonic()
    if now - self._looked < _LOOK_EVERY:
      return 0
    self._looked = now
    try:
      if not self._request.exists():
        return 0
      text = self._request.read_text(errors="replace")[:100].strip()
      if not text:  # about to be written
        return 0
      self._request.unlink()
    except OSError as error:
      self._complain(error)
      return 0
    if not re.fullmatch(r"\d{1,4}", text, re.ASCII) or not 0 < int(text) <= _MOST:
      self._say(f"{self._request} holds {text!r}; write a number of steps, 1 to {_MOST}")
      return 0
    return int(text)

  def _complain(self, error: Exception) -> None:
    self._say(f"no trace ({type(error).__name__}: {error}); training goes on")

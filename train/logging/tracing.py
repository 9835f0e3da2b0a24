"""Profiler traces of a few steps, planned or requested during a run.

    lnssm-train fit --config FILE --profile 100:104
    echo 5 > RUN/profile        traces the next 5 steps and removes the file

Traces are written to RUN/traces/START-STOP, for xprof, and the time of each part of the model is
printed (`train.logging.profiles`). With several processes the devices of process 0 are traced. The
request is a file, not a signal, because a signal ends a process that has no handler yet, and would
have to reach one process of many.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

import jax

from lnssm_jax.files.printable import shell_word
from lnssm_jax.files.reading import open_regular
from train.cluster import distributed
from train.config.checked import check
from train.logging import profiles
from train.loop import Callback, Moment
from train.messages import Say, first_line

_MAX_STEPS = 1000  # larger traces cannot be opened
_LOOK_EVERY = 1.0  # seconds


def steps_of(text: str) -> range:
  """Parses "START:STOP", both inclusive.

  Raises:
    ConfigError: not of that form, or too many steps.
  """
  found = re.fullmatch(r"(\d{1,12}):(\d{1,12})", text, re.ASCII)
  steps = range(int(found[1]), int(found[2]) + 1) if found else range(0)
  check(
    0 < len(steps) <= _MAX_STEPS and steps[0] > 0,
    f"--profile {text} must be START:STOP with 1 <= START <= STOP, at most {_MAX_STEPS} steps; for "
    "example --profile 100:104.",
  )
  return steps


class Tracer(Callback):
  """Starts and stops the profiler around steps. Errors are reported and do not stop training.

  `program` gives the text of the compiled step, which says which part of the model an operation
  belongs to.
  """

  def __init__(self, run: Path, steps: range | None, say: Say, program: Callable[[], str | None]):
    self._request, self._traces = run / "profile", run / "traces"
    self._steps, self._say, self._program = steps, say, program
    self._running: range | None = None
    self._looked = 0.0
    self._reported = ""
    self._is_first = distributed.is_first()

  def before_step(self, now: Moment) -> None:
    if not self._is_first or self._running:
      return
    step = now.step + 1
    count = self._requested()
    if count:
      self._start(range(step, step + count))
    elif self._steps and step in self._steps:
      self._start(range(step, self._steps.stop))
      self._steps = None

  def after_step(self, now: Moment) -> None:
    if self._running and now.step >= self._running[-1]:
      jax.block_until_ready(now.metrics)
      self.close()

  def close(self) -> None:
    """Ends the running trace, if any."""
    steps, self._running = self._running, None
    if steps:
      try:
        jax.profiler.stop_trace()
      except Exception as error:
        self._report(error)
        return
      folder = self._folder(steps)
      self._say(f"traced steps {steps[0]} to {steps[-1]}: {folder}")
      try:
        lines = profiles.summary(profiles.read(folder), self._program() or "", len(steps))
      except Exception as error:
        lines = [f"no summary of the trace ({first_line(error)})"]
      for line in [*lines, f"to look at it: pip install xprof, then xprof {shell_word(folder)}"]:
        self._say(line)

  def _start(self, steps: range) -> None:
    try:
      if self._traces.is_symlink():
        raise OSError(f"{self._traces} is a link; links are not followed")
      jax.profiler.start_trace(self._folder(steps))
      self._running = steps
    except Exception as error:
      self._report(error)

  def _folder(self, steps: range) -> str:
    return str(self._traces / f"{steps[0]}-{steps[-1]}")

  def _requested(self) -> int:
    """Number of steps requested by the file, which is removed after reading."""
    now = time.monotonic()
    if now - self._looked < _LOOK_EVERY:
      return 0
    self._looked = now
    try:
      with open_regular(self._request) as file:
        text = file.read(100).decode(errors="replace").strip()
      if not text:  # still being written
        return 0
      self._request.unlink()
    except FileNotFoundError:
      return 0
    except OSError as error:
      self._report(error)
      return 0
    if not re.fullmatch(r"\d{1,4}", text, re.ASCII) or not 0 < int(text) <= _MAX_STEPS:
      self._say(f"{self._request} contains {text!r}; write a number of steps, 1 to {_MAX_STEPS}")
      return 0
    return int(text)

  def _report(self, error: Exception) -> None:
    line = f"no trace ({first_line(error)}); training continues"
    if line != self._reported:  # once, not every second
      self._say(line)
    self._reported = line

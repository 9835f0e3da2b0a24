"""Graceful stop: SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 request a stop.

A second SIGINT, as by Ctrl-C, ends the process at once. Any other signal may come again: schedulers
send SIGUSR1 or SIGUSR2 before SIGTERM, SIGTERM to a group and to each of its processes, and a
closing terminal sends SIGHUP twice.
"""

import contextlib
import functools
import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class StopSignal:
  """Context that records the first of `SIGNALS` and is true from then on.

  Under `nohup` SIGHUP stays ignored.

  Args:
    exit_code: of the process, by the name of a signal. It ends at once with a signal that comes
      before `begin`, even inside a long call of a library: there is nothing to save yet.
  """

  def __init__(self, exit_code: Callable[[str], int] | None = None):
    self.name: str | None = None
    self._exit_code = exit_code
    self._before = {}
    self._pipe = ()

  def __bool__(self) -> bool:
    return self.name is not None

  def __enter__(self) -> "StopSignal":
    if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
      if self._exit_code is not None:
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)  # as `set_wakeup_fd` requires
        signal.set_wakeup_fd(self._pipe[1])
        watch = functools.partial(_watch, self._pipe[0], self._exit_code)
        threading.Thread(target=watch, name="signals", daemon=True).start()
      ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
      numbers = SIGNALS[:-1] if ignored else SIGNALS
      self._before = {number: signal.signal(number, self._note) for number in numbers}
    return self

  def __exit__(self, *_) -> None:
    self.begin()
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def begin(self) -> None:
    """From now on signals are only recorded, for training that looks at them."""
    if self._pipe:
      signal.set_wakeup_fd(-1)
      os.close(self._pipe[1])  # the thread ends
      self._pipe = ()

  def _note(self, number: int, frame: FrameType | None) -> None:
    del frame
    self.name = self.name or signal.Signals(number).name
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _watch(source: int, exit_code: Callable[[str], int]) -> None:
  """Ends the process with the first of `SIGNALS`, whose numbers Python writes into a pipe."""
  while number := os.read(source, 1):
    if number[0] in SIGNALS:
      name = signal.Signals(number[0]).name
      line = f"stopped by {name} before training began. Run the same command to resume.\n"
      with contextlib.suppress(OSError):
        if select.select([], [1], [], 0)[1]:  # a full pipe would hold the process
          os.write(1, line.encode())
      os._exit(exit_code(name))
  os.close(source)


def begun(stop: StopSignal | None) -> contextlib.AbstractContextManager[StopSignal]:
  """Context of `stop`, which only records signals from now on; of another one if there is none."""
  if stop is None:
    return StopSignal()
  stop.begin()
  return contextlib.nullcontext(stop)

"""Graceful stop: SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 request a stop.

A second SIGINT or SIGTERM ends the process. Schedulers send SIGUSR1 or SIGUSR2 before SIGTERM.
"""

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class StopSignal:
  """Context that records the first of `SIGNALS` and is true from then on.

  Default handlers of SIGINT and SIGTERM are restored then, so that a second one ends the process at
  once; not of SIGHUP, which a closing terminal sends twice. Under `nohup` SIGHUP stays ignored.
  """

  def __init__(self):
    self.name: str | None = None
    self._before = {}

  def __bool__(self) -> bool:
    return self.name is not None

  def __enter__(self) -> "StopSignal":
    if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
      ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
      numbers = SIGNALS[:-1] if ignored else SIGNALS
      self._before = {number: signal.signal(number, self._note) for number in numbers}
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _note(self, number: int, frame: FrameType | None) -> None:
    del frame
    self.name = self.name or signal.Signals(number).name
    for each in (signal.SIGINT, signal.SIGTERM):
      signal.signal(each, signal.SIG_DFL)

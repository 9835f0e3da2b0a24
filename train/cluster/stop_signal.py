"""Graceful stop: SIGINT and SIGTERM request a stop, a second signal ends the process at once."""

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
  """Context that records the first SIGINT or SIGTERM and is true from then on.

  Default handlers are restored then, so that a second signal ends the process at once.
  """

  def __init__(self):
    self.name: str | None = None
    self._before = {}

  def __bool__(self) -> bool:
    return self.name is not None

  def __enter__(self) -> "StopSignal":
    if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
      self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _note(self, number: int, frame: FrameType | None) -> None:
    del frame
    self.name = signal.Signals(number).name
    for each in SIGNALS:
      signal.signal(each, signal.SIG_DFL)

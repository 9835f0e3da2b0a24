"""The process of a command: its end, with the exit code, whatever threads libraries have left.

Python joins all threads before it exits. One that waits for something that never comes, such as a
part of a save that failed, would keep the process, its exit code and its machine.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from train.cluster.stop_signal import SIGNALS, StopSignal
from train.messages import write

PATIENCE = 3.0  # seconds for threads to end


def run(command: Callable[[], int | None] | None = None) -> NoReturn:
  """Runs `train.cli.main.main`, or another command, and ends the process with its exit code."""
  atexit.register(_ignore_signals)  # first of all, so called last
  if command is None:
    from train.cli.main import main as command
  # Raising is a help with one's own arrays; our products broadcast on purpose. JAX, which reads it,
  # is imported later.
  os.environ["JAX_NUMPY_RANK_PROMOTION"] = "allow"
  try:
    code: int | str | None = command()
  except SystemExit as error:
    code = error.code  # pyrefly: ignore
  except BaseException:
    sys.excepthook(*sys.exc_info())  # pyrefly: ignore
    code = 1
  if isinstance(code, str):  # as Python itself does
    write(sys.stderr, f"{code}\n")
    code = 1
  leave(code or 0)


def leave(code: int) -> NoReturn:
  """Ends the process as `sys.exit`, but waits for threads at most `PATIENCE` seconds.

  Handlers of `atexit`, which leave the other processes of a run in order, run in either case, and
  may take as long as they need. No signal changes the code any more; a second Ctrl-C ends them.
  """
  StopSignal().__enter__()
  joined = threading.Event()

  def end() -> None:
    if joined.wait(PATIENCE):
      return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
      write(stream, "")
    os._exit(code)

  atexit.register(joined.set)  # called first of all handlers, after threads have been joined
  threading.Thread(target=end, name="exit", daemon=True).start()
  sys.exit(code)


def _ignore_signals() -> None:
  """While Python takes itself apart, it would restore the default of what it handles."""
  if threading.current_thread() is threading.main_thread():
    for number in SIGNALS:
      signal.signal(number, signal.SIG_IGN)

"""Several processes of one sweep on this machine, which share its groups."""

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence

from train.cluster import stop_signal
from train.cluster.stop_signal import StopSignal
from train.messages import Say

# Each takes the memory of a GPU that it needs, instead of most of it when it starts.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
_STARTED = "LNSSM_JAX_STARTED_BY_SWEEP"  # set in the environment of the processes


def run(
  command: Sequence[str], count: int, say: Say, stop: StopSignal | None = None
) -> tuple[str | None, list[str]]:
  """Runs a command in `count` processes, with their lines numbered, until all have ended.

  The first of `stop_signal.SIGNALS` is forwarded to them. `ENVIRONMENT` yields to what is set.
  Their standard input is a pipe that ends with this process, however that ends.

  Returns:
    The name of that signal, and a line for each process that failed.
  """
  children: list[subprocess.Popen[str]] = []
  lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
  sent = None
  with stop_signal.begun(stop) as stop:
    try:
      for number in range(1, count + 1):
        child = subprocess.Popen(
          command,
          env=ENVIRONMENT | os.environ | {_STARTED: "1"},
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          text=True,
          errors="replace",
          start_new_session=True,  # a terminal's Ctrl-C would reach them twice
        )
        children.append(child)
        threading.Thread(target=_read, args=(child, number, lines), daemon=True).start()
      running = count
      while running:
        if stop.name and not sent:
          sent = signal.Signals[stop.name]
          for child in children:
            child.send_signal(sent)
        with contextlib.suppress(queue.Empty):
          line = lines.get(timeout=0.1)
          if line is None:
            running -= 1
          else:
            say(line)
    except BaseException:
      for child in children:
        child.terminate()
      raise
    finally:
      for child in children:
        child.wait()
        if child.stdin is not None:
          child.stdin.close()
  # Exit codes of a stopped sweep (`train.cli.main`), and of one that had not begun to train.
  expected = {0} if sent is None else {0, 128 + signal.SIGHUP, 128 + signal.SIGINT, -sent}
  failures = [
    f"process {number} of {count} ended with exit status {child.returncode}"
    for number, child in enumerate(children, 1)
    if child.returncode not in expected
  ]
  return stop.name, failures


def end_with_parent() -> None:
  """In a process that `run` started: stops it, as SIGTERM does, once its parent has ended.

  A parent that is killed forwards no signal, and nobody would know of its processes.
  """
  if os.environ.pop(_STARTED, None) is None:
    return

  def wait() -> None:
    with contextlib.suppress(OSError):
      while os.read(0, 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)

  threading.Thread(target=wait, name="parent", daemon=True).start()


def _read(child: subprocess.Popen[str], number: int, lines: queue.SimpleQueue[str | None]) -> None:
  """Puts the lines of a process into `lines`, and None at their end."""
  assert child.stdout is not None
  with child.stdout:
    for line in child.stdout:
      lines.put(f"[{number}] {line.rstrip()}")
  lines.put(None)

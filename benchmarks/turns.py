"""Processes that compile together and then run one after the other, each alone.

    for result in turns.take([[sys.executable, "-m", "benchmarks.x", "--one", name], ...]):

and in the process, when everything is compiled: `turns.wait()`, then measure and print one line of
JSON. Lowering a kernel is work of one core in Python, which threads share; and a compiler at work
slows what is timed, because it times kernels on the same GPU.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

AT_ONCE = 7  # processes that compile
_READY = "ready for its turn"


def wait() -> None:
  """Returns when the process that called `take` says that it is this one's turn."""
  print(_READY, flush=True)
  sys.stdin.readline()


def alone(command: Sequence[str], longest: float | None = None) -> dict[str, Any]:
  """The object that one command prints as its last line of JSON; as `take`, without turns.

  One that takes longer than `longest` seconds is ended.
  """
  how: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": longest}
  try:
    ended = subprocess.run(command, **how)
  except subprocess.TimeoutExpired:
    return {"note": f"not finished after {longest} s"}
  return _last(ended.stdout.splitlines(), ended.returncode, ended.stderr or ended.stdout)


def take(
  commands: Sequence[Sequence[str]], at_once: int = AT_ONCE, patience: float | None = None
) -> Iterator[dict[str, Any]]:
  """The object that each command prints as its last line of JSON, in order.

  One that fails yields {"note": the end of what it printed}. If the caller stops, all are killed,
  and after `patience` seconds those that are not ready.
  """
  with contextlib.ExitStack() as stack:
    started: list[subprocess.Popen[str]] = []
    printed: list[list[str]] = []
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    end = time.monotonic() + (threading.TIMEOUT_MAX if patience is None else patience)
    for number, command in enumerate(commands):
      if number >= at_once:
        _read_ready(started[number - at_once], printed[number - at_once], end)
      process = subprocess.Popen(command, **pipes, stderr=subprocess.STDOUT, text=True)
      stack.enter_context(process)
      stack.callback(process.kill)
      started.append(process)
      printed.append([])
    for process, lines in zip(started, printed, strict=True):
      _read_ready(process, lines, end)
    for process, lines in zip(started, printed, strict=True):
      with contextlib.suppress(BrokenPipeError):  # it has failed, and says why
        process.stdin.write("\n")
        process.stdin.close()
      _read(process, lines, until=None)
      yield _last(lines, process.wait(), " ".join(lines))


def _last(lines: Sequence[str], status: int, said: str) -> dict[str, Any]:
  found = [line for line in lines if line.startswith("{")]
  return {"note": " ".join(said.split())[-300:]} if status or not found else json.loads(found[-1])


def _read_ready(process, lines: list[str], end: float) -> None:
  """Reads until the process is ready; kills it at the time `end`."""

  def kill():
    lines.append("not ready in time")
    process.kill()

  timer = threading.Timer(max(0.0, end - time.monotonic()), kill)
  timer.start()
  _read(process, lines, until=_READY)
  timer.cancel()


def _read(process, lines: list[str], until: str | None) -> None:
  """Reads what is printed up to a line, which may have been read before; None: to the end."""
  if until is not None and until in lines:
    return
  for line in process.stdout:
    lines.append(line.strip())
    if lines[-1] == until:
      return

"""The process of `lnssm-train serve`: one model, a thread of the device, and a process of HTTP."""

import errno
import os
import socket
import subprocess
import sys
import threading
import time
import types
from multiprocessing.connection import Connection, Pipe

from lnssm_jax.files.printable import PrintableError
from lnssm_jax.files.reading import DataError
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.slots import Slots
from train.cluster.stop_signal import StopSignal
from train.messages import Say
from train.serving.engine import Engine
from train.serving.link import Served

_MIB = 1 << 20
_PATIENCE = 1.0  # second for the call of the device that the engine is in; it may be compiling
_MOST_SLOTS = 1 << 16
_FIXES = {
  errno.EADDRINUSE: "give another port, or 0 for a free one",
  errno.EACCES: "give a port from 1024 on, as those below need privileges",
}


class FrontError(PrintableError, RuntimeError):
  """The process of HTTP has failed; its own lines say how."""

  exit_code = 1  # of the command line


def serve(
  loaded: LoadedModel,
  *,
  say: Say,
  host: str = "127.0.0.1",
  port: int = 8000,
  slots: int = 16,
  queue: int = 256,
  most_tokens: int | None = None,
  prefix_memory: int = 256,
) -> None:
  """Serves a model until the process is told to end.

  Args:
    say: gets the address, once connections are accepted.
    port: 0 takes a free one.
    slots: texts that are continued at once; each has a state on the device.
    queue: texts that wait for a slot; more are rejected.
    most_tokens: of a prompt and its continuation; None: what the model's caches hold, or 32,768.
    prefix_memory: MiB of the device for states of what was read.

  Raises:
    DataError: a package is missing, or the address is taken or not of this machine.
    FrontError: the process of HTTP has failed.
    ValueError: an argument is out of range.
  """
  try:
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
  except ImportError as error:
    raise DataError(f"serve needs the extra `serve` ({error}): pip install '.[serve]'") from None

  most_tokens = (loaded.model.max_length or 32_768) if most_tokens is None else most_tokens
  for option, size in {"slots": slots, "queue": queue, "most-tokens": most_tokens}.items():
    check_positive(f"--{option}", size)
  if slots > _MOST_SLOTS or prefix_memory < 0:  # each slot has a state, in memory at once
    raise ValueError(
      f"--slots {slots} must be at most {_MOST_SLOTS}, --prefix-memory {prefix_memory} at least 0."
    )
  kept = {name: getattr(loaded.model, name) for name in ("vocab_size", "max_length", "dtype")}
  served = Served(
    types.SimpleNamespace(**kept),
    {"sample": loaded.settings.get("sample", {})},
    loaded.source.resolve(),
    loaded.tokenizer,
    slots,
    queue,
    most_tokens,
  )
  batch = Slots(loaded.model, slots, prefix_memory=prefix_memory * _MIB)
  connection, other = Pipe()
  with _listening(host, port) as listening, other:
    at, port = listening.getsockname()[:2]
    front = _start(other, listening)
  engine = Engine(batch, connection)
  thread = threading.Thread(target=engine.run, name="engine")
  with StopSignal() as stop:
    try:
      if _is_ready(connection, served):
        thread.start()
        at = f"[{at}]" if ":" in at else at
        say(
          f"serving {served.source.name} at http://{at}:{port}/v1, {slots} slots, at most"
          f" {most_tokens:,} tokens of a text"
        )
      while front.poll() is None and not stop:
        time.sleep(0.1)
    finally:
      front.terminate()
      code = front.wait()
  if thread.ident:
    thread.join(_PATIENCE)
  if engine.failure is not None:
    raise engine.failure
  if code and not stop:
    raise FrontError(f"the process of HTTP has ended with exit status {code}.")


def _start(connection: Connection, listening: socket.socket) -> subprocess.Popen[bytes]:
  """A process of `front`; its modules are those of this one, whatever the working folder has."""
  numbers = connection.fileno(), listening.fileno()
  return subprocess.Popen(
    [sys.executable, "-P", "-m", "train.serving.front", *map(str, numbers)],
    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    pass_fds=numbers,
    start_new_session=True,  # a terminal's Ctrl-C is for this process
  )


def _is_ready(connection: Connection, served: Served) -> bool:
  """Tells the process of HTTP what it serves; false if that has failed."""
  try:
    connection.send(served)
    connection.recv()
  except (EOFError, ConnectionError):
    return False
  return True


def _listening(host: str, port: int) -> socket.socket:
  """A socket at an address of this machine, of IPv4 if a name has both."""
  if not 0 <= port <= 65_535:
    raise ValueError(f"--port {port} must be from 0 to 65535; 0 takes a free one.")
  try:
    if not host:  # the sockets' name of all addresses, but also that of a variable that is not set
      raise socket.gaierror("it is empty")
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host  # as in a URL
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    family, *_, address = min(found, key=lambda x: x[0] != socket.AF_INET)
    return socket.create_server(address, family=family, backlog=1024)
  except (OSError, TypeError, UnicodeError) as error:  # no name can have null, or is this long
    is_of_address = isinstance(error, OSError) and not isinstance(error, socket.gaierror)
    number = (error.errno or 0) if is_of_address else 0
    said = os.strerror(number).lower() if number else getattr(error, "strerror", None) or error
    fix = _FIXES.get(number, "give an address of this machine, as 127.0.0.1, or 0.0.0.0 for all")
    raise DataError(f"--host {host!r:.200} --port {port}: {said}; {fix}.") from None

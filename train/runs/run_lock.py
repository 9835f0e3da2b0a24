"""The lock of a run folder: one process trains in it, on any file system.

Two locks, because neither is enough. `flock` on the folder ends with its process, but some network
file systems have none, or one per machine, and it stays with a folder that is renamed. The file
`running.json` in the folder names the process that trains: host, number, start. A thread renews the
time of that file every BEAT seconds. Of a process on this machine the kernel knows whether it
lives; one elsewhere has ended if its file is not renewed for STALE seconds, by the clock of the
file system. Then the next process takes over.
"""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from lnssm_jax.files.atomic import create, write_all
from lnssm_jax.files.printable import PrintableError, printable
from lnssm_jax.files.reading import read_json
from train.messages import Say, first_line

FILE = "running.json"
BEAT, STALE = 10.0, 60.0  # seconds


class LockedError(PrintableError, RuntimeError):
  """Another process trains in the folder; the message says which."""


class RunLock:
  """The lock of the run folder `path`, held until `close` or the end of the process.

  Raises:
    LockedError: another process holds it.
    OSError: the folder cannot be written.
  """

  def __init__(self, path: Path, say: Say):
    self._path, self._say = path, say
    self._mine = {"id": secrets.token_hex(8), **_this_process()}
    self._lost: str | None = None
    self._descriptor, self._folder = _flock(path), _identity(path)
    try:
      self._take()
    except BaseException:
      self._unlock()
      raise
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._renew, name="run lock", daemon=True)
    self._thread.start()

  def check(self) -> None:
    """Raises LockedError if another process has taken over, for example from a suspended one."""
    if self._lost is not None:
      raise LockedError(self._lost)

  def close(self) -> None:
    """Releases the lock."""
    self._ended.set()
    self._thread.join()
    if self._owner() == self._mine:
      with contextlib.suppress(OSError):
        (self._path / FILE).unlink()
    self._unlock()

  def _take(self) -> None:
    """Creates the file, unless its owner lives."""
    owner = None
    for _ in range(3):
      if self._create():
        return
      time.sleep(0.05)  # it may just be created
      owner = self._owner()
      if owner is None and not os.path.lexists(self._path / FILE):
        continue
      if self._is_alive(owner):
        break
      self._say(f"{_name(owner)} trained in {self._path} and has ended; taking over")
      self._put_aside(owner)
    raise LockedError(
      f"another process is training in {self._path}: {_name(owner)}. Wait for it, or use --set "
      "run_dir=ANOTHER."
    )

  def _create(self) -> bool:
    try:
      with create(self._path / FILE) as file:
        write_all(file, json.dumps(self._mine).encode())
    except FileExistsError:
      return False
    return True

  def _put_aside(self, owner: dict[str, Any] | None) -> None:
    """Removes the file of `owner`, and no other that replaced it meanwhile."""
    file = self._path / FILE
    aside = file.with_name(f"{FILE}.{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):
      file.rename(aside)
      if _read(aside) != owner:
        with contextlib.suppress(OSError):
          os.link(aside, file)
      aside.unlink()

  def _owner(self) -> dict[str, Any] | None:
    return _read(self._path / FILE)

  def _is_alive(self, owner: dict[str, Any] | None) -> bool:
    if owner is not None and owner.get("machine") == self._mine["machine"]:
      started = _start_of(owner.get("process"))
      return started is not None and started == owner.get("started")
    return self._is_renewed(owner)

  def _is_renewed(self, owner: dict[str, Any] | None) -> bool:
    """Watches the file of a process elsewhere, for STALE seconds after its last renewal at most."""
    first = self._renewed()
    end = time.monotonic() + min(STALE, STALE - (self._now() - first))
    if time.monotonic() < end:
      self._say(f"{_name(owner)} may be training in {self._path}; waiting up to {STALE:.0f} s")
    while time.monotonic() < end:
      time.sleep(min(0.5, BEAT / 4))
      if self._renewed() != first or self._owner() != owner:
        return True
    return False

  def _renewed(self) -> float:
    """Time of the last renewal; opening the file makes a network file system ask its server."""
    try:
      descriptor = os.open(self._path / FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
      return 0.0
    try:
      return os.fstat(descriptor).st_mtime
    finally:
      os.close(descriptor)

  def _now(self) -> float:
    """The time, by the clock that `_renewed` reads."""
    with tempfile.TemporaryFile(dir=self._path) as file:
      file.write(b"x")
      file.flush()
      os.fsync(file.fileno())
      return os.fstat(file.fileno()).st_mtime

  def _renew(self) -> None:
    failed = False
    while not self._ended.wait(BEAT):
      try:
        owner = self._owner()
        if owner == self._mine:
          os.utime(self._path / FILE)
        elif owner is not None:
          self._lost = self._why_lost(owner)
          return
        elif self._path.is_dir():
          self._create()
        failed = False
      except OSError as error:  # tried again
        if not failed:
          self._say(f"{self._path / FILE} cannot be renewed ({first_line(error)})")
        failed = True

  def _why_lost(self, owner: dict[str, Any] | None) -> str:
    if _identity(self._path) != self._folder:
      return (
        f"the folder that this process trained in was renamed or removed, and {_name(owner)} "
        f"trains in a new one at {self._path}; this one ends without saving."
      )
    return (
      f"{_name(owner)} has taken over {self._path}, which this process did not renew for "
      f"{STALE:.0f} s (it was suspended, or the disk hung); this one ends without saving."
    )

  def _unlock(self) -> None:
    if self._descriptor is not None:
      os.close(self._descriptor)


def _identity(path: Path) -> tuple[int, int] | None:
  """Device and inode of a folder; None if there is none."""
  with contextlib.suppress(OSError):
    found = path.stat()
    return found.st_dev, found.st_ino
  return None


def _flock(path: Path) -> int | None:
  """Locks the folder until the returned descriptor is closed; None if its files have no locks."""
  descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    os.close(descriptor)
    raise LockedError(
      f"another process is training in {path}: {_name(_read(path / FILE))}. Wait for it, or use "
      "--set run_dir=ANOTHER."
    ) from None
  except OSError:
    os.close(descriptor)
    return None
  return descriptor


def _read(file: Path) -> dict[str, Any] | None:
  try:
    return read_json(file, 1 << 16)
  except (OSError, ValueError):
    return None


def _name(owner: dict[str, Any] | None) -> str:
  if owner is None:
    return "an unknown process"
  number, host = (printable(owner.get(name), 80) for name in ("process", "host"))
  return f"process {number} on {host}"


def _this_process() -> dict[str, Any]:
  """Host, number and start of this process; "machine" is equal where such numbers are shared."""
  machine = [socket.gethostname()]
  with contextlib.suppress(OSError):
    machine.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    machine.append(os.readlink("/proc/self/ns/pid"))  # of a container
  number = os.getpid()
  return {
    "host": socket.gethostname(),
    "machine": " ".join(machine),
    "process": number,
    "started": _start_of(number),
  }


def _start_of(number: Any) -> str | None:
  """When a process of this machine was started, in the kernel's units; None if it has ended."""
  if type(number) is not int:
    return None
  try:
    state, *fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]
  except OSError:
    pass
  if Path("/proc/self").exists():
    return None
  try:  # no /proc on this system
    os.kill(number, 0)
  except ProcessLookupError:
    return None
  except OSError:
    pass
  return "running"

"""The folders of a run's checkpoints, one per step.

checkpoints/
  1000/  1500/         finished checkpoints with their digests; other names are never loaded
  2000.saving          being written, or left by a killed process; removed at the next start
  500.deleting         being deleted, likewise
  1500.damaged         renamed because it is damaged; never deleted

Other processes may read while the run saves and deletes. A reader holds a shared lock on the folder
of its step (`held`), which retention respects; where the file system has no locks, a step that is
gone after a failed read was deleted, not damaged, and the next newest is taken.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from lnssm_jax.files.atomic import sync_folder
from lnssm_jax.files.printable import PrintableError, shell_word
from train.checkpoint import digests
from train.messages import Say

SAVING, DELETING, DAMAGED = ".saving", ".deleting", ".damaged"


class CheckpointError(PrintableError, RuntimeError):
  """A checkpoint cannot be written or read; the message says which one and what to do."""

  exit_code = 1  # of the command line


def steps_in(directory: str | Path) -> list[int]:
  """Steps with a folder that is not empty, intact or not, in ascending order.

  Raises:
    CheckpointError: the folder, or that of a step, may not be read.
  """
  directory = Path(directory)
  try:
    if not directory.is_dir():
      return []
    return sorted(int(p.name) for p in directory.iterdir() if _is_step(p) and not _is_empty(p))
  except PermissionError as error:
    raise _not_readable(error.filename or directory, error) from error


def newest_step(directory: str | Path) -> int | None:
  """Newest step in `directory`, intact or not; None without any."""
  return max(steps_in(directory), default=None)


class DeletedError(CheckpointError):
  """The run deleted a checkpoint while it was read."""


class Step:
  """A checkpoint that is being read; `held` makes it."""

  def __init__(self, path: Path):
    self.path, self.number = path, int(path.name)
    self._identity = _identity(path)

  def is_there(self) -> bool:
    """Whether the folder still has its name."""
    return self._identity is not None and _identity(self.path) == self._identity

  def damage(self, parts: Iterable[str] | None = None, *, content: bool = True) -> str | None:
    """As `digests.damage`.

    Raises:
      DeletedError: it was deleted meanwhile.
      CheckpointError: this process may not read it, which says nothing about the files.
    """
    try:
      wrong = digests.damage(self.path, parts, content=content)
    except OSError as error:
      self.check_there()
      raise _not_readable(self.path, error) from error
    if wrong is not None:
      self.check_there()
    return wrong

  def check_there(self) -> None:
    """Raises DeletedError if the folder is gone, which explains any failure to read it."""
    if not self.is_there():
      raise DeletedError(
        f"checkpoint {self.path} was deleted by its run while it was read; read a newer one, or "
        "increase keep_checkpoints."
      )


@contextlib.contextmanager
def held(directory: Path, step: int) -> Iterator[Step]:
  """Context in which the run does not delete the checkpoint of `step`, where files have locks."""
  path = directory / str(step)
  descriptor = None
  with contextlib.suppress(OSError):  # `Step` says what is wrong with it
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
  try:
    yield Step(path)
  finally:
    if descriptor is not None:
      os.close(descriptor)


@contextlib.contextmanager
def newest_held(
  directory: str | Path, say: Say, parts: Iterable[str] | None = None
) -> Iterator[Step | None]:
  """Context with the newest step whose files are as they were written; None without checkpoints.

  Args:
    say: reports each newer checkpoint and its damage.
    parts: check only these trees (`digests.damage`).

  Raises:
    CheckpointError: there are checkpoints, and all are damaged.
  """
  directory, lines = Path(directory), {}
  while steps := [s for s in steps_in(directory) if s not in lines]:
    with held(directory, steps[-1]) as step:
      try:
        wrong = step.damage(parts)
      except DeletedError:
        continue  # the run has newer ones by now
      if wrong is None:
        for line in lines.values():
          say(f"{line}; using step {step.number} instead")
        yield step
        return
      lines[step.number] = f"checkpoint {step.path} is damaged: {wrong}"
  if lines:
    raise CheckpointError(
      "no checkpoint is intact:",
      *(f"  {line}" for line in lines.values()),
      "Restore one of these folders from a backup, or move all of them away to start again. If you "
      "know that one is intact (for example written without digests): lnssm-train verify "
      f"{shell_word(directory.parent)} --adopt STEP",
    )
  yield None


def newest_intact(
  directory: str | Path, say: Say, parts: Iterable[str] | None = None
) -> int | None:
  """The number of the step of `newest_held`; arguments and errors as there."""
  with newest_held(directory, say, parts) as step:
    return None if step is None else step.number


@contextlib.contextmanager
def intact_held(directory: Path, number: int, parts: Iterable[str] | None = None) -> Iterator[Step]:
  """Context with the checkpoint of step `number`, which is as it was written.

  Raises:
    FileNotFoundError: no such checkpoint; the message lists the steps that exist.
    CheckpointError: it is damaged, or was deleted meanwhile.
  """
  steps = steps_in(directory)
  if number not in steps:
    listing = f"; existing steps: {', '.join(map(str, steps))}" if steps else ""
    raise FileNotFoundError(f"no checkpoint of step {number} in {directory}{listing}.")
  with held(directory, number) as step:
    wrong = step.damage(parts)
    if wrong is not None:
      raise CheckpointError(f"checkpoint {step.path} is damaged: {wrong}; use another.")
    yield step


def clear_leftovers(directory: Path) -> None:
  """Removes folders that a killed process was writing or deleting; what fails, the next call does.

  A run calls this before each save, and continues without free descriptors or with a sick disk.
  """
  with contextlib.suppress(OSError):
    for path in directory.iterdir() if directory.is_dir() else ():
      step, dot, rest = path.name.partition(".")
      if step.isdecimal() and f"{dot}{rest}".startswith((SAVING, DELETING)):
        _remove(path)


def set_aside_after(directory: Path, step: int, say: Say) -> None:
  """Renames the damaged checkpoints of later steps, which will be trained again."""
  for later in [s for s in steps_in(directory) if s > step]:
    path = directory / str(later)
    aside, count = path.with_name(path.name + DAMAGED), 1
    while aside.exists():
      aside, count = path.with_name(f"{path.name}{DAMAGED}.{count}"), count + 1
    path.rename(aside)
    say(f"{path} was renamed to {aside.name}")


def publish(staging: Path, step: int) -> None:
  """Writes the digests of a finished folder, then renames it to its step, atomically.

  Everything in it is on disk before it has that name; `sync` makes the name durable.
  """
  final = staging.with_name(str(step))
  digests.write(staging, final.name)
  staging.rename(final)  # replaces an empty folder of that name


def sync(directory: Path) -> None:
  """Makes the names of the checkpoints durable, and that of their folder.

  Raises:
    OSError: the disk has failed.
  """
  sync_folder(directory)
  sync_folder(directory.parent)


def keep_newest(directory: Path, count: int) -> None:
  """Deletes all but the `count` newest steps, each atomically.

  Those that another process reads are deleted after a later save.
  """
  deleting = list(directory.glob(f"*{DELETING}"))
  for step in steps_in(directory)[:-count]:
    path = directory / str(step)
    with contextlib.suppress(OSError):  # retried after the next save
      deleting.append(_renamed_unless_held(path, path.with_name(path.name + DELETING)))
  if deleting:
    sync_folder(directory)  # or a power failure could leave the old name with half of its files
  for path in deleting:
    _remove(path)


def _renamed_unless_held(path: Path, target: Path) -> Path:
  """Renames a folder; BlockingIOError if a reader holds it."""
  descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
  try:
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise
    except OSError:  # no locks here
      pass
    return path.rename(target)
  finally:
    os.close(descriptor)


def _not_readable(path: str | Path, error: OSError) -> CheckpointError:
  place = f", {error.filename}" if error.filename and str(error.filename) != str(path) else ""
  return CheckpointError(
    f"checkpoint {path} cannot be read ({error.strerror or error}{place}), which does not mean "
    "that it is damaged; it is left as it is. Give this process access to its files, and start "
    "again."
  )


def _is_step(path: Path) -> bool:
  name = path.name
  return name.isascii() and name.isdecimal() and str(int(name)) == name and path.is_dir()


def _is_empty(folder: Path) -> bool:
  try:
    return not any(folder.iterdir())
  except FileNotFoundError:  # deleted meanwhile
    return True


def _identity(path: Path) -> tuple[int, int] | None:
  """Device and inode of a folder, or of a link in its place; None if there is none."""
  try:
    found = path.lstat()
  except OSError:
    return None
  return found.st_dev, found.st_ino


def _remove(path: Path) -> None:
  with contextlib.suppress(OSError):
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

"""The folders of a run's checkpoints, one per step.

checkpoints/
  1000/  1500/         finished checkpoints with their digests; other names are never loaded
  2000.saving          being written, or left by a killed process; removed at the next start
  500.deleting         being deleted, likewise
  1500.damaged         renamed because it is damaged; never deleted
"""

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from train.checkpoint import digests
from train.messages import Say

SAVING, DELETING, DAMAGED = ".saving", ".deleting", ".damaged"


class CheckpointError(RuntimeError):
  """A checkpoint cannot be written or read; the message says which one and what to do."""

  exit_code = 1  # of the command line


def steps_in(directory: str | Path) -> list[int]:
  """Steps with a folder that is not empty, intact or not, in ascending order."""
  directory = Path(directory)
  if not directory.is_dir():
    return []
  return sorted(int(p.name) for p in directory.iterdir() if _is_step(p) and any(p.iterdir()))


def newest_step(directory: str | Path) -> int | None:
  """Newest step in `directory`, intact or not; None without any."""
  return max(steps_in(directory), default=None)


def newest_intact(
  directory: str | Path, say: Say, parts: Iterable[str] | None = None
) -> int | None:
  """Newest step whose files are as they were written; None if there is no checkpoint.

  Args:
    say: reports each newer checkpoint and its damage.
    parts: check only these trees (`digests.damage`).

  Raises:
    CheckpointError: there are checkpoints, and all are damaged.
  """
  directory, lines = Path(directory), []
  for step in reversed(steps_in(directory)):
    wrong = digests.damage(directory / str(step), parts)
    if wrong is None:
      for line in lines:
        say(f"{line}; using step {step} instead")
      return step
    lines.append(f"checkpoint {directory / str(step)} is damaged: {wrong}")
  if lines:
    raise CheckpointError(
      "no checkpoint is intact:\n  " + "\n  ".join(lines) + "\nRestore one of these folders "
      "from a backup, or move all of them away to start again. If you know that one is intact (for "
      f"example written without digests): python -m train verify {directory.parent} --adopt STEP"
    )
  return None


def intact(directory: Path, step: int, parts: Iterable[str] | None = None) -> int:
  """Returns `step` if its checkpoint is as it was written.

  Raises:
    FileNotFoundError: no such checkpoint; the message lists the steps that exist.
    CheckpointError: it is damaged.
  """
  steps = steps_in(directory)
  if step not in steps:
    listing = f"; existing steps: {', '.join(map(str, steps))}" if steps else ""
    raise FileNotFoundError(f"no checkpoint of step {step} in {directory}{listing}.")
  wrong = digests.damage(directory / str(step), parts)
  if wrong is not None:
    raise CheckpointError(f"checkpoint {directory / str(step)} is damaged: {wrong}; use another.")
  return step


def clear_leftovers(directory: Path) -> None:
  """Removes folders that a killed process was writing or deleting."""
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
  """Writes the digests of a finished folder, then renames it to its step, atomically."""
  final = staging.with_name(str(step))
  digests.write(staging, final.name)
  staging.rename(final)  # replaces an empty folder of that name


def keep_newest(directory: Path, count: int) -> None:
  """Deletes all but the `count` newest steps, each atomically."""
  for step in steps_in(directory)[:-count]:
    path = directory / str(step)
    with contextlib.suppress(OSError):  # retried after the next save
      path.rename(path.with_name(path.name + DELETING))
  for path in directory.glob(f"*{DELETING}"):
    _remove(path)


def _is_step(path: Path) -> bool:
  name = path.name
  return name.isascii() and name.isdecimal() and str(int(name)) == name and path.is_dir()


def _remove(path: Path) -> None:
  with contextlib.suppress(OSError):
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

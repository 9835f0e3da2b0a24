"""The folders of checkpoints, one a step: which there are, which is intact, which go.

checkpoints/
  1000/  1500/         finished, each with its digests; the only names that count
  2000.saving…         being written, or left by a process that was killed; removed at the start
  500.deleting         on its way out, likewise
  1500.damaged         put aside, never deleted
"""

import contextlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from train import digests

SAVING, DELETING, DAMAGED = ".saving", ".deleting", ".damaged"

Say = Callable[[str], object]


class CheckpointError(RuntimeError):
  """A checkpoint could not be written or read; the message says which, and what to do."""

  exit_code = 1  # of the command line


def steps_in(directory: str | Path) -> list[int]:
  """Steps that have a folder with anything in it, in ascending order, intact or not."""
  directory = Path(directory)
  if not directory.is_dir():
    return []
  return sorted(int(p.name) for p in directory.iterdir() if _is_step(p) and any(p.iterdir()))


def newest_step(directory: str | Path) -> int | None:
  """The newest step in `directory`, or None. Whether it is intact is not looked at."""
  return max(steps_in(directory), default=None)


def newest_intact(
  directory: str | Path, say: Say, parts: Iterable[str] | None = None
) -> int | None:
  """The newest step whose files are all as they were written; None when there is no step at all.

  Args:
    say: takes one line for each newer checkpoint, with what is wrong with it.
    parts: look only at these of its trees (`digests.damage`).

  Raises:
    CheckpointError: there are checkpoints, and all of them are damaged.
  """
  directory, lines = Path(directory), []
  for step in reversed(steps_in(directory)):
    wrong = digests.damage(directory / str(step), parts)
    if wrong is None:
      for line in lines:
        say(f"{line}; going back to step {step}")
      return step
    lines.append(f"checkpoint {directory / str(step)} is damaged: {wrong}")
  if lines:
    raise CheckpointError(
      "no checkpoint is intact:\n  " + "\n  ".join(lines) + "\nBring one of these folders back "
      "from a copy, or move all of them away to start anew. If you know that one is whole (it was "
      f"made without digests, say): python -m train verify {directory.parent} --adopt STEP"
    )
  return None


def intact(directory: Path, step: int, parts: Iterable[str] | None = None) -> int:
  """`step`, if its checkpoint is as it was written.

  Raises:
    FileNotFoundError: there is none; the message lists those there are.
    CheckpointError: it is damaged.
  """
  steps = steps_in(directory)
  if step not in steps:
    listing = f"; there are {', '.join(map(str, steps))}" if steps else ""
    raise FileNotFoundError(f"no checkpoint of step {step} in {directory}{listing}.")
  wrong = digests.damage(directory / str(step), parts)
  if wrong is not None:
    raise CheckpointError(f"checkpoint {directory / str(step)} is damaged: {wrong}; take another.")
  return step


def clear_leftovers(directory: Path) -> None:
  """Removes what a process that was killed had not finished writing or deleting."""
  for path in directory.iterdir() if directory.is_dir() else ():
    step, dot, rest = path.name.partition(".")
    if step.isdecimal() and f"{dot}{rest}".startswith((SAVING, DELETING)):
      _remove(path)


def put_aside_after(directory: Path, step: int, say: Say) -> None:
  """Renames the folders of later steps, which are damaged and will be trained again."""
  for later in [s for s in steps_in(directory) if s > step]:
    path = directory / str(later)
    aside, count = path.with_name(path.name + DAMAGED), 1
    while aside.exists():
      aside, count = path.with_name(f"{path.name}{DAMAGED}.{count}"), count + 1
    path.rename(aside)
    say(f"{path} was renamed {aside.name}")


def publish(staging: Path, step: int) -> None:
  """Gives a finished folder its digests and then, in one move, the name that makes it count."""
  final = staging.with_name(str(step))
  digests.write(staging, final.name)
  staging.rename(final)  # an empty folder of that name gives way


def keep_newest(directory: Path, count: int) -> None:
  """Deletes all but the `count` newest steps; none is ever seen half deleted."""
  for step in steps_in(directory)[:-count]:
    path = directory / str(step)
    with contextlib.suppress(OSError):  # tried again after the next save
      path.rename(path.with_name(path.name + DELETING))
  for path in directory.glob(f"*{DELETING}"):
    _remove(path)


def _is_step(path: Path) -> bool:
  name = path.name
  return name.isascii() and name.isdecimal() and str(int(name)) == name and path.is_dir()


def _remove(path: Path) -> None:
  with contextlib.suppress(OSError):
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

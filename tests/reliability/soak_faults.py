"""Faults of `tests.reliability.soak`: damage to files, limits, clocks."""

import contextlib
import dataclasses
import errno
import os
import random
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

from train import config
from train.checkpoint import step_folders

TARGETS = (
  "checkpoint", "token files", "sidecar", "tokenizer", "text", "config.json", "metrics.jsonl",
  "programs",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Harm:
  """A change of one file, and how to undo it."""

  target: str
  path: Path
  before: bytes
  modified: int  # in nanoseconds

  def undo(self) -> None:
    """Writes the content back, with its modification time."""
    self.path.parent.mkdir(parents=True, exist_ok=True)
    self.path.write_bytes(self.before)
    os.utime(self.path, ns=(self.modified, self.modified))

  def is_named_in(self, text: str) -> bool:
    """Whether a message names the file, the checkpoint that it is part of, or the set of text."""
    words = {
      "checkpoint": [
        word
        for part in self.path.parts
        if part.isdecimal()
        for word in (f"/{part}", f"step {part}")
      ],
      "token files": [self.path.stem],
      "sidecar": [self.path.stem],
      "text": ["the text of", self.path.name],
    }.get(self.target, [self.path.name])
    return any(word in text for word in words)

  def is_detectable(self) -> bool:
    """Whether `train verify` has to report it: a checkpoint or token files as they are now."""
    return self.target in ("checkpoint", "token files") and _bytes(self.path) != self.before


def flip(content: bytearray, rng: random.Random) -> bytearray:
  """Flips one bit."""
  content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
  return content


def cut(content: bytearray, rng: random.Random) -> bytearray:
  """Truncates, as a power cut does."""
  return content[: rng.randrange(len(content))]


def zero(content: bytearray, rng: random.Random) -> bytearray:
  """Zeros from a random byte to the end of its page."""
  start = rng.randrange(len(content))
  end = min(len(content), start // 4096 * 4096 + 4096)
  content[start:end] = bytes(end - start)
  return content


def grow(content: bytearray, rng: random.Random) -> bytearray:
  """Appends random bytes."""
  return content + rng.randbytes(rng.randint(1, 64))


def delete(content: bytearray, rng: random.Random) -> None:
  """Removes the file."""
  del content, rng


DAMAGES: tuple[Callable[[bytearray, random.Random], bytearray | None], ...] = (
  flip, flip, flip, cut, zero, grow, delete,
)  # fmt: skip


def damage(cfg: config.Train, target: str, rng: random.Random) -> tuple[str, Harm] | None:
  """Damages a file of the run or of its data; returns how, and the harm, if there was a file."""
  files = [path for path in _files(cfg, target) if path.stat().st_size]
  if not files:
    return None
  change, path = rng.choice(DAMAGES), rng.choice(files)
  try:
    before, modified = path.read_bytes(), path.stat().st_mtime_ns
    after = change(bytearray(before), rng)
    if after == before:
      return None
    if after is None:
      path.unlink()
    else:
      with path.open("r+b") as file:  # in place: a process may have mapped it
        file.write(after)
        file.truncate(len(after))
  except FileNotFoundError:  # removed by retention
    return None
  if rng.random() < 0.5 and after is not None:  # rotten disks leave the times as they are
    os.utime(path, ns=(modified, modified))
  return change.__name__, Harm(target, path, before, modified)


def _files(cfg: config.Train, target: str) -> list[Path]:
  run, data = Path(cfg.run_dir), Path(cfg.data.folder)
  sets = [data / name for name in (*cfg.data.train, *cfg.data.validation)]
  if target == "checkpoint":
    newest = step_folders.newest_step(run / "checkpoints")
    found = [] if newest is None else (run / "checkpoints" / str(newest)).rglob("*")
  elif target == "programs":
    found = (run / "programs").rglob("*")
  else:
    found = {
      "token files": [Path(f"{name}{end}") for name in sets for end in (".bin", ".crc32", ".idx")],
      "sidecar": [Path(f"{name}.json") for name in sets],
      "tokenizer": [data / "tokenizer.json"],
      "text": [Path(source) for source in cfg.data.sources.values()],
      "config.json": [run / "config.json"],
      "metrics.jsonl": [run / "metrics.jsonl"],
    }[target]
  return sorted(path for path in found if path.is_file())


def _bytes(path: Path) -> bytes | None:
  return path.read_bytes() if path.is_file() else None


def move_times(cfg: config.Train, rng: random.Random) -> None:
  """Gives every file of the run and of its data a random modification time, from 1970 to 2100."""
  roots = Path(cfg.run_dir), Path(cfg.data.folder)
  texts = [Path(source) for source in cfg.data.sources.values()]
  for path in [*texts, *(path for root in roots for path in root.rglob("*") if path.is_file())]:
    seconds = rng.randrange(4_102_444_800)
    os.utime(path, (seconds, seconds))


def limit_files(pid: int, cfg: config.Train, rng: random.Random) -> Callable[[], None]:
  """Makes writes fail or come back short, as on a full disk; returns what ends that."""
  metrics = Path(cfg.run_dir) / "metrics.jsonl"
  room = rng.choice((0, metrics.stat().st_size + rng.randrange(2000)))
  return _limit(pid, resource.RLIMIT_FSIZE, room)


def limit_descriptors(pid: int, cfg: config.Train, rng: random.Random) -> Callable[[], None]:
  """Lets no file be opened; returns what ends that."""
  del cfg, rng
  return _limit(pid, resource.RLIMIT_NOFILE, 3)


def replace_folder(pid: int, cfg: config.Train, rng: random.Random) -> Callable[[], None]:
  """Lets no checkpoint be created, as on a read-only disk, also for root; returns what ends that.

  A file takes the place of their folder.
  """
  del pid, rng
  folder = Path(cfg.run_dir) / "checkpoints"
  hidden = folder.with_name("checkpoints of before")
  if folder.exists():
    folder.rename(hidden)
  folder.write_text("")

  def end() -> None:
    folder.unlink()
    if hidden.exists():
      hidden.rename(folder)

  return end


FOR_A_WHILE = {
  "full disk": limit_files, "no descriptors": limit_descriptors, "read-only disk": replace_folder,
}  # fmt: skip


def failing_syncs(seed: int) -> Callable[[], None]:
  """Returns what makes a sync of this process fail now and then, at most one in three seconds.

  Of the last checkpoint there are four attempts within 7 seconds.
  """

  def begin() -> None:
    rng, sync, last = random.Random(seed), os.fsync, [0.0]

    def fail_or_sync(descriptor: int) -> None:
      now = time.monotonic()
      if now - last[0] > 3 and rng.random() < 0.1:
        last[0] = now
        raise OSError(errno.EIO, "Input/output error")
      sync(descriptor)

    os.fsync = fail_or_sync

  return begin


def _limit(pid: int, which: int, most: int) -> Callable[[], None]:
  before = resource.prlimit(pid, which)
  resource.prlimit(pid, which, (most, before[1]))

  def end() -> None:
    with contextlib.suppress(ProcessLookupError):  # the run is complete
      resource.prlimit(pid, which, before)

  return end


def jumping_clock(seed: int) -> Callable[[], None]:
  """Returns what makes this process's `time.time` jump by up to 10 years every few seconds."""

  def begin() -> None:
    rng, real, real_ns = random.Random(seed), time.time, time.time_ns
    offset = [0]
    time.time = lambda: real() + offset[0]
    time.time_ns = lambda: real_ns() + offset[0] * 10**9

    def jump() -> None:
      while True:
        offset[0] = rng.randint(-10, 10) * 365 * 86400 + rng.randint(-1000, 1000)
        # Orbax's timeouts follow this clock: a save during which it jumps fails, and of the last
        # checkpoint there are four attempts.
        time.sleep(rng.uniform(0, 8))

    threading.Thread(target=jump, daemon=True).start()

  return begin

"""Fills the disk under a run, then makes it read-only, temporarily; needs permission to mount.

    sudo python -m tests.reliability.disk

The run folder is on a small file system in memory. While it is full, and later while it is
read-only, training must continue; afterwards it must save, and metrics.jsonl must be complete.
"""

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.reliability import processes, tiny_run
from train import config
from train.checkpoint import digests, step_folders
from train.runs.run_folder import RunFolder


def train(cfg: config.Train) -> None:
  """The run."""
  from train.trainer import fit

  fit(cfg)


def wait_until(true: Callable[[], object], what: str, seconds: float = 240) -> None:
  """Polls; raises TimeoutError."""
  end = time.monotonic() + seconds
  while not true():
    if time.monotonic() > end:
      raise TimeoutError(what)
    time.sleep(0.02)


def mount(*arguments: str) -> None:
  subprocess.run(["mount", *arguments], check=True)


def newest(cfg: config.Train) -> int:
  return step_folders.newest_step(RunFolder(cfg.run_dir).checkpoints) or 0


def harm(cfg: config.Train, log: Path, begin: Callable[[], None], end: Callable[[], None]) -> int:
  """Causes one disk failure during a run after a save; returns the number of failed saves."""
  since, failures = newest(cfg), log.read_text().count("could not be written")
  wait_until(lambda: newest(cfg) > since, "the run saves")
  begin()
  wait_until(
    lambda: log.read_text().count("could not be written") >= failures + 3, "three saves fail"
  )
  end()
  healed = newest(cfg)
  wait_until(lambda: newest(cfg) > healed, "the run saves again")
  return log.read_text().count("could not be written") - failures


def main(arguments: list[str] | None = None) -> int:
  """Prints the results; raises if they are not as expected."""
  argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(arguments)
  with tempfile.TemporaryDirectory() as name:
    root = Path(name)
    disk, log = root / "disk", root / "log.txt"
    disk.mkdir()
    log.touch()
    processes.share_compilations(root / "compiled")
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk))
    try:
      changes = {"run_dir": str(disk / "run"), "steps": 1000, "checkpoint_every": 50}
      cfg = tiny_run.settings(root, "run", **changes)
      (child,) = processes.start(train, cfg, processes=1, devices=1, log=log)
      filler = disk / "filler"

      def fill() -> None:
        with filler.open("wb", buffering=0) as file:
          try:
            while True:
              file.write(bytes(4096))
          except OSError:
            pass

      def read_only() -> None:
        while True:  # busy while a file is open for writing
          try:
            return mount("-o", "remount,ro", str(disk))
          except subprocess.CalledProcessError:
            time.sleep(0.01)

      failed = harm(cfg, log, fill, filler.unlink)
      print(f"disk full: {failed} saves failed, training went on, then it saved again")
      failed = harm(cfg, log, read_only, lambda: mount("-o", "remount,rw", str(disk)))
      print(f"read-only: {failed} saves failed, training went on, then it saved again")
      processes.join([child], log)
      steps = tiny_run.curve(cfg).keys()
      if steps != set(range(1, cfg.steps + 1)):
        raise RuntimeError(f"{cfg.steps - len(steps)} rows are missing")
      for step in step_folders.steps_in(disk / "run" / "checkpoints"):
        wrong = digests.damage(disk / "run" / "checkpoints" / str(step))
        print(f"step {step}: {wrong or 'intact'}; all {cfg.steps} rows are in metrics.jsonl")
    finally:
      subprocess.run(["umount", str(disk)], check=False)
  return 0


if __name__ == "__main__":
  if os.geteuid():
    raise SystemExit("this mounts a file system: run it as root")
  raise SystemExit(main())

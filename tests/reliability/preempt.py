"""Sends SIGTERM to one process of a run and checks that all stop together.

    python -m tests.reliability.preempt --processes 2 4 --times 5

Each run resumes where the previous one stopped. All processes must exit with 0 after the same step,
which must be saved; the last column is the time from the signal to the last exit.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from tests.reliability import processes, tiny_run
from train import config
from train.checkpoint import digests
from train.runs.run_folder import RunFolder


def train(cfg: config.Train, folder: Path) -> None:
  """Trains and records the outcome."""
  import jax

  from train.trainer import fit

  result = fit(cfg)
  record = {"step": result.step, "stopped_by": result.stopped_by}
  (folder / f"ended-{jax.process_index()}.json").write_text(json.dumps(record))


def stop_once(cfg: config.Train, count: int, victim: int, wait: int, root: Path) -> dict:
  """Starts `count` processes and stops `victim` after about `wait` steps; returns the outcome."""
  run, log = RunFolder(cfg.run_dir), root / "log.txt"
  before = max(tiny_run.curve(cfg), default=0) if run.metrics_file.exists() else 0
  children = processes.start(train, cfg, root, processes=count, devices=count, log=log)
  while not (run.metrics_file.exists() and max(tiny_run.curve(cfg), default=0) >= before + wait):
    time.sleep(0.05)
    if any(child.exitcode for child in children):
      break
  begin = time.monotonic()
  os.kill(children[victim].pid, signal.SIGTERM)
  processes.join(children, log)
  spent = time.monotonic() - begin
  steps = [json.loads((root / f"ended-{i}.json").read_text())["step"] for i in range(count)]
  (step,) = set(steps)  # the same for all
  damage = digests.damage(run.checkpoints / str(step))
  if damage or step >= cfg.steps:
    raise RuntimeError(f"step {step} was not saved when stopped: {damage}")
  return {"processes": count, "victim": victim, "step": step, "seconds": spent}


def main(arguments: list[str] | None = None) -> int:
  """Prints a line per signal."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
  parser.add_argument("--times", type=int, default=5)
  options = parser.parse_args(arguments)
  rng = random.Random(0)
  with tempfile.TemporaryDirectory() as name:
    root = Path(name)
    processes.share_compilations(root / "compiled")
    for count in options.processes:
      mesh = config.Mesh(data=-1)
      cfg = tiny_run.settings(root, f"of{count}", mesh=mesh, steps=100_000, checkpoint_every=1000)
      for _ in range(options.times):
        row = stop_once(cfg, count, rng.randrange(count), rng.randint(3, 30), root)
        print("{processes} processes, SIGTERM to {victim}: all saved step {step} and ended with 0, "
              "{seconds:.2f} s".format(**row), flush=True)  # fmt: skip
  return 0


if __name__ == "__main__":
  raise SystemExit(main())

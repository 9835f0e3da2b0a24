"""Kills a run again and again (SIGKILL, at random moments) and compares it with one left alone.

    python -m benchmarks.reliability.kills --kills 200 --steps 20000 --out kills.csv

Each time the run starts again by itself, from its newest intact checkpoint. Whatever it ever wrote
into metrics.jsonl, also what a kill made it compute again, must equal the uninterrupted run's
numbers in every bit, and so must the parameters at the end. Moments are spread over the whole life
of a process: starting, loading, training, saving, deleting old checkpoints.
"""

import argparse
import csv
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.reliability import tiny_run
from train import config, step_folders
from train.checkpoint import newest_step

FIELDS = ("kill", "seconds", "reached", "saved", "lost", "damaged", "leftovers")


def train(cfg: config.Train, log: Path) -> None:
  """Runs in a child: imported already, not yet started."""
  with log.open("a") as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
  from train.loop import fit

  fit(cfg)


def start(cfg: config.Train, log: Path) -> multiprocessing.Process:
  """A fork of this process, which has imported everything and started no backend: quick."""
  child = multiprocessing.get_context("fork").Process(target=train, args=(cfg, log))
  child.start()
  return child


def whole_run(cfg: config.Train, log: Path) -> None:
  """The run, left alone."""
  child = start(cfg, log)
  child.join()
  if child.exitcode:
    raise RuntimeError(f"the run failed, see {log}:\n{log.read_text()[-2000:]}")


def seconds_to_start(cfg: config.Train, log: Path) -> float:
  """From the start of a process to its first step, the programs being compiled already."""
  begin, metrics = time.monotonic(), Path(cfg.run_dir) / "metrics.jsonl"
  child = start(cfg, log)
  while not (metrics.exists() and metrics.stat().st_size):
    time.sleep(0.01)
  spent = time.monotonic() - begin
  os.kill(child.pid, signal.SIGKILL)
  child.join()
  return spent


def compare(reference: dict, seen: dict) -> tuple[int, float]:
  """How many steps were compared, and the largest difference of any number."""
  differences = [abs(a - b) for s in seen for a, b in zip(seen[s], reference[s], strict=True)]
  return len(seen), max(differences, default=0.0)


def storm(root: Path, kills: int, steps: int, seed: int) -> tuple[list[dict], float, int]:
  """Rows of `FIELDS`, the largest difference ever seen, and how many numbers were compared."""
  rng, log = random.Random(seed), root / "log.txt"
  alone = tiny_run.settings(root, "alone", steps=steps)
  killed = tiny_run.settings(root, "killed", steps=steps)
  whole_run(alone, log)
  reference = tiny_run.curve(alone)
  start_up = seconds_to_start(tiny_run.settings(root, "started", steps=steps), log)
  checkpoints = Path(killed.run_dir) / "checkpoints"
  rows, largest, compared, reached = [], 0.0, 0, 0
  for kill in range(1, kills + 1):
    child = start(killed, log)
    # A third of the moments are in the start, the others in the training after it.
    late = start_up * rng.uniform(*((0, 1) if rng.random() < 1 / 3 else (0.8, 2)))
    child.join(late)
    over = child.exitcode is not None
    if not over:
      os.kill(child.pid, signal.SIGKILL)
      child.join()
    elif child.exitcode:
      raise RuntimeError(f"the run failed, see {log}:\n{log.read_text()[-2000:]}")
    metrics = Path(killed.run_dir) / "metrics.jsonl"
    seen = tiny_run.curve(killed) if metrics.exists() else {}
    count, difference = compare(reference, seen)
    compared, largest = compared + count, max(largest, difference)
    reached = max(seen, default=0)
    saved = newest_step(checkpoints) or 0
    said: list[str] = []
    step_folders.newest_intact(checkpoints, said.append)
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.exists() else []
    row = (kill, f"{late:.2f}", reached, saved, reached - saved, len(said),
           sum(not name.isdecimal() for name in names))  # fmt: skip
    rows.append(dict(zip(FIELDS, row, strict=True)))
    print(*(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if over:
      break
  whole_run(killed, log)
  final = tiny_run.curve(killed)
  if final.keys() != reference.keys():
    raise RuntimeError("steps are missing in the end")
  count, difference = compare(reference, final)
  return rows, max(largest, difference, parameters_differ(alone, killed)), compared + count


def parameters_differ(a: config.Train, b: config.Train) -> float:
  """1 if the last checkpoints of two runs differ in a bit of any array, else 0."""
  import jax
  import numpy as np

  from train.checkpoint import load
  from train.loop import abstract_state
  from train.mesh import make_mesh

  def arrays(cfg):
    state = abstract_state(cfg, make_mesh(cfg))
    trees = {"params": state["params"], "optimizer": {k: state[k] for k in ("opt_state", "step")}}
    return jax.tree.leaves(load(Path(cfg.run_dir) / "checkpoints", trees)[0])

  pairs = zip(arrays(a), arrays(b), strict=True)
  return float(not all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs))


def main(arguments: list[str] | None = None) -> int:
  """Prints what was seen; 1 if any number differed."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--kills", type=int, default=200)
  parser.add_argument("--steps", type=int, default=20_000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--out", type=Path, help="a CSV file for the kills")
  options = parser.parse_args(arguments)
  import jax

  import train.loop  # noqa: F401  so that the children need not

  with tempfile.TemporaryDirectory() as root:
    jax.config.update("jax_compilation_cache_dir", f"{root}/compiled")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    rows, largest, compared = storm(Path(root), options.kills, options.steps, options.seed)
  if options.out:
    with options.out.open("w", newline="") as file:
      writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
      writer.writeheader()
      writer.writerows(rows)
  lost = [row["lost"] for row in rows]
  print(
    f"{len(rows)} kills, {compared} rows compared, largest difference {largest:g}; steps trained "
    f"again after a kill: {sum(lost) / len(lost):.1f} on average, {max(lost)} at most; damaged "
    f"checkpoints: {sum(row['damaged'] for row in rows)}; unfinished folders seen: "
    f"{sum(row['leftovers'] for row in rows)}"
  )
  return int(largest > 0)


if __name__ == "__main__":
  sys.exit(main())

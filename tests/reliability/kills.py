"""Kills a run repeatedly (SIGKILL at random times) and compares it with an uninterrupted one.

    python -m tests.reliability.kills --kills 200 --steps 20000 --figure kills.png

After each kill the run restarts from its newest intact checkpoint. All rows ever written to
metrics.jsonl, including recomputed ones, must equal those of the uninterrupted run bit for bit, and
so must the final parameters. `--kills` counts kills after the process has written a row: while
training, saving, or deleting old checkpoints. One more in five comes earlier, while a process
starts and loads.
"""

import argparse
import csv
import dataclasses
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.reliability import tiny_run
from train import config
from train.checkpoint import step_folders
from train.checkpoint.store import newest_step

FIELDS = ("kill", "phase", "seconds", "reached", "saved", "lost", "damaged", "leftovers")
STARTING, TRAINING = "starting", "training"
Curve = dict[int, tuple[float, float, float]]


def train(cfg: config.Train, log: Path) -> None:
  """Trains in a forked child, which has all imports done and no backend started."""
  with log.open("a") as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
  from train.trainer import fit

  fit(cfg)


def start(cfg: config.Train, log: Path) -> BaseProcess:
  """Forks this process, which has imported everything and started no backend, for speed."""
  child = multiprocessing.get_context("fork").Process(target=train, args=(cfg, log))
  child.start()
  return child


def whole_run(cfg: config.Train, log: Path) -> float:
  """Trains the uninterrupted run; returns seconds from its first row to its end."""
  child = start(cfg, log)
  wait_for_row(cfg, child, None)
  begin = time.monotonic()
  child.join()
  check(child, log)
  return time.monotonic() - begin


def wait_for_row(cfg: config.Train, child: BaseProcess, before: int | None) -> None:
  """Waits until `child` has written a row or has ended.

  Args:
    before: the inode of metrics.jsonl before it started. A process first writes the file again,
      with the rows up to its checkpoint, and then adds to it.
  """
  metrics = Path(cfg.run_dir) / "metrics.jsonl"
  kept = None  # bytes of the rows up to the checkpoint
  while child.exitcode is None:
    if inode(metrics) not in (None, before):
      size = metrics.stat().st_size
      kept = size if kept is None else kept
      if size > kept:
        return
    time.sleep(0.001)


def inode(path: Path) -> int | None:
  """Identity of the file at `path`, if any."""
  try:
    return path.stat().st_ino
  except FileNotFoundError:
    return None


def kill(child: BaseProcess, log: Path) -> bool:
  """Kills the process; returns whether it was still running."""
  if child.exitcode is None:
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    return True
  check(child, log)
  return False


def check(child: BaseProcess, log: Path) -> None:
  """Raises RuntimeError if the process failed."""
  if child.exitcode:
    raise RuntimeError(f"the run failed, see {log}:\n{log.read_text()[-2000:]}")


def seconds_to_start(cfg: config.Train, log: Path) -> float:
  """Seconds from the start of a process to its first row, with compiled programs cached."""
  begin, child = time.monotonic(), start(cfg, log)
  wait_for_row(cfg, child, None)
  spent = time.monotonic() - begin
  kill(child, log)
  return spent


def compare(reference: dict, seen: dict) -> tuple[int, float]:
  """Number of compared steps, and the largest difference."""
  differences = [abs(a - b) for s in seen for a, b in zip(seen[s], reference[s], strict=True)]
  return len(seen), max(differences, default=0.0)


def storm(root: Path, kills: int, steps: int, seed: int) -> tuple[list[dict], float, int, list]:
  """Compares the rows of `FIELDS`: largest difference, number of comparisons, curves.

  The curves: of the run left alone, and what each process of the other had added when it died.
  """
  rng, log = random.Random(seed), root / "log.txt"
  alone = tiny_run.settings(root, "alone", steps=steps)
  killed = tiny_run.settings(root, "killed", steps=steps)
  seconds = whole_run(alone, log)
  reference = tiny_run.curve(alone)
  start_up = seconds_to_start(tiny_run.settings(root, "started", steps=steps), log)
  checkpoints, metrics = (Path(killed.run_dir) / name for name in ("checkpoints", "metrics.jsonl"))
  rows, largest, compared, curves, counted = [], 0.0, 0, [reference], 0
  while counted < kills:
    saved, before = newest_step(checkpoints) or 0, inode(metrics)
    child, phase = start(killed, log), STARTING if rng.random() < 1 / 6 else TRAINING
    if phase == TRAINING:
      wait_for_row(killed, child, before)
      late = seconds / kills * rng.uniform(0, 1.6)  # on average enough steps for all kills
    else:
      late = start_up * rng.uniform(0, 1)
    child.join(late)
    over = not kill(child, log)
    counted += phase == TRAINING
    seen = tiny_run.curve(killed) if metrics.exists() else {}
    count, difference = compare(reference, seen)
    compared, largest = compared + count, max(largest, difference)
    if inode(metrics) != before:
      curves.append({step: values for step, values in seen.items() if step > saved})
    reached = max(seen, default=0)
    saved = newest_step(checkpoints) or 0
    said: list[str] = []
    step_folders.newest_intact(checkpoints, said.append)
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.exists() else []
    row = (len(rows) + 1, phase, f"{late:.2f}", reached, saved, reached - saved, len(said),
           sum(not name.isdecimal() for name in names))  # fmt: skip
    if over:
      break
    rows.append(dict(zip(FIELDS, row, strict=True)))
    print(*(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
  whole_run(killed, log)
  final = tiny_run.curve(killed)
  if final.keys() != reference.keys():
    raise RuntimeError("steps are missing in the end")
  count, difference = compare(reference, final)
  largest = max(largest, difference, parameters_differ(alone, killed))
  return rows, largest, compared + count, [*curves, {s: final[s] for s in final if s > saved}]


def draw(curves: list[Curve], output: Path) -> None:
  """Plots the losses of the uninterrupted run and of each killed process."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, (whole, part) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
  reference, *pieces = curves
  middle = sorted(len(piece) for piece in pieces)[len(pieces) // 2]
  last = max(reference)
  for axis, (low, high) in ((whole, (0, last)), (part, (last // 2, last // 2 + 6 * middle))):
    shown = lambda curve, low=low, high=high: [s for s in curve if low <= s <= high]
    steps = shown(reference)
    axis.plot(steps, [reference[s][0] for s in steps], color="0.8", linewidth=5,
              label="uninterrupted")  # fmt: skip
    for number, piece in enumerate(pieces):
      steps = shown(piece)
      label = f"in {len(pieces)} pieces, each but the last ended by SIGKILL" if not number else None
      style = {"color": ("C0", "C1")[number % 2], "linewidth": 0.8, "label": label}
      axis.plot(steps, [piece[s][0] for s in steps], **style)
      if steps and axis is part and steps[-1] == max(piece) != last:
        axis.plot(steps[-1], piece[steps[-1]][0], "kx", markersize=5)
    axis.set(xlabel="step", ylabel="loss, nats per token")
    axis.grid(alpha=0.3)
  whole.legend(frameon=False, fontsize=7)
  part.set_title("the middle of it; x: killed", fontsize=9)
  figure.savefig(output, dpi=110)
  plt.close(figure)


def parameters_differ(a: config.Train, b: config.Train) -> float:
  """Returns 1 if the last checkpoints of two runs differ in any bit, else 0."""
  import jax
  import numpy as np

  from train.checkpoint.store import load
  from train.cluster.device_mesh import make_mesh
  from train.step.state import abstract_state

  def arrays(cfg):
    cfg = dataclasses.replace(cfg, mesh=config.Mesh(data=1))  # whatever it was trained on
    state = abstract_state(cfg, make_mesh(cfg))
    trees = {"params": state["params"], "optimizer": {k: state[k] for k in ("opt_state", "step")}}
    return jax.tree.leaves(load(Path(cfg.run_dir) / "checkpoints", trees)[0])

  pairs = zip(arrays(a), arrays(b), strict=True)
  return float(not all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs))


def main(arguments: list[str] | None = None) -> int:
  """Prints the results; returns 1 if any number differed."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--kills", type=int, default=200)
  parser.add_argument("--steps", type=int, default=20_000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--out", type=Path, help="a CSV file for the kills")
  parser.add_argument("--figure", type=Path, help="a picture of the losses, such as kills.png")
  options = parser.parse_args(arguments)
  import jax

  import train.trainer  # noqa: F401  so that the children need not

  with tempfile.TemporaryDirectory() as root:
    jax.config.update("jax_compilation_cache_dir", f"{root}/compiled")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    rows, largest, compared, curves = storm(Path(root), options.kills, options.steps, options.seed)
  if options.out:
    with options.out.open("w", newline="") as file:
      writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
      writer.writeheader()
      writer.writerows(rows)
  if options.figure:
    draw(curves, options.figure)
  lost = [row["lost"] for row in rows if row["phase"] == TRAINING]
  print(
    f"{len(lost)} kills in training, {len(rows) - len(lost)} in starting; {compared} rows compared,"
    f" largest difference {largest:g}; steps trained again after a kill: "
    f"{sum(lost) / max(len(lost), 1):.1f} on average, {max(lost, default=0)} at most; damaged "
    f"checkpoints: {sum(row['damaged'] for row in rows)}; unfinished folders seen: "
    f"{sum(row['leftovers'] for row in rows)}"
  )
  return int(largest > 0)


if __name__ == "__main__":
  sys.exit(main())

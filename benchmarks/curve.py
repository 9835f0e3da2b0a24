"""Draws the loss curves of run folders: training loss and bits per byte of every validation set.

python -m benchmarks.curve runs/lnssm_72m_books --output docs/curve.png     # needs matplotlib
"""

import argparse
import json
from pathlib import Path

import numpy as np


def rows_of(run: Path):
  """(training rows, evaluation rows) of a run's metrics.jsonl."""
  rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
  evaluations = [row for row in rows if row.get("kind") == "eval"]
  return [row for row in rows if row.get("kind") != "eval"], evaluations


def draw(runs: list[Path], output: Path):
  """Writes one PNG with a line per run and set."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
  for run in runs:
    training, evaluations = rows_of(run)
    steps, losses = (np.array([row[key] for row in training]) for key in ("step", "loss"))
    left.plot(steps, losses, alpha=0.25, linewidth=0.8, color="C0")
    width = max(1, len(losses) // 40)
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    left.plot(steps[width - 1 :], smooth, color="C0", label=f"{run.name}, training")
    for name in dict.fromkeys(row["set"] for row in evaluations):
      points = [(row["step"], row["bits_per_byte"]) for row in evaluations if row["set"] == name]
      right.plot(*zip(*points, strict=True), marker=".", label=name)
  left.set(xlabel="step", ylabel="nats per token", ylim=(None, np.percentile(losses, 99)))
  right.set(xlabel="step", ylabel="bits per byte")
  for axis in (left, right):
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
  figure.savefig(output, dpi=110)


def main():
  """Reads the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("runs", nargs="+", type=Path)
  parser.add_argument("--output", type=Path, required=True)
  args = parser.parse_args()
  draw(args.runs, args.output)


if __name__ == "__main__":
  main()

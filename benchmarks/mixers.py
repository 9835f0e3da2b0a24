"""Training speed and memory of every mixer in one language model, in one run.

    python -m benchmarks.mixers --out docs/mixers.csv
    python -m benchmarks.mixers --only lnssm gla --set model.dim=1024

All that differs is the mixer: the model, the batch and the step are those of the configuration,
measured as `benchmarks.train_step` does, each mixer in a process of its own. `--jobs` of them
compile at the same time, and when `--together` have, one after the other measures. (With twelve at
a time on 16 cores compiling came to a halt; with six or seven each took 20 to 90 s.) Memory is what
the compiler reserves for one step: arguments, results and everything between.

Rows marked "no boundaries" have no document boundaries in the batch: softmax attention can then
run in the kernel of cuDNN.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

import jax

from benchmarks import csv_rows, turns
from benchmarks.timing import allocated
from benchmarks.train_step import Run, compile_step, random_batch
from lnssm_jax.mixers import MIXERS
from lnssm_jax.models import count_parameters
from train.cluster import device_mesh
from train.config import apply_overrides, load_config
from train.step.model import build_model
from train.step.state import init_state

CONFIG = "configs/lnssm_72m.py"
NO_BORDERS = "no boundaries"
ATTENTION = ("softmax_attention", "sliding_window_attention")
ROWS = (*MIXERS, *(f"{name} {NO_BORDERS}" for name in ATTENTION))
FIELDS = (
  "mixer", "parameters", "state", "step_ms", "step_ms_range", "tokens_per_second", "memory_gib",
  "compile_s", "note",
)  # fmt: skip


def state_size(cfg) -> int:
  """Numbers of one layer's state for one sequence, those of its channel mixer left out."""
  states = jax.eval_shape(lambda: build_model(cfg.model, jax.random.key(0)).init_state(1))
  numbers = sum(math.prod(x.shape) for x in jax.tree.leaves(states.mixer))
  return numbers // cfg.model.num_layers


def measure(row: str, cfg, kernels: Path, when_ready, *, steps: int, runs: int) -> dict:
  """The columns of one row; calls `when_ready` between compiling and measuring."""
  mesh = device_mesh.make_mesh(cfg)
  batch = random_batch(cfg, mesh, boundaries=NO_BORDERS not in row)
  compiled, seconds = compile_step(cfg, mesh, batch, kernels)
  state = init_state(cfg, mesh)
  columns = {"mixer": row, "state": state_size(cfg), "compile_s": f"{seconds:.1f}"}
  columns["parameters"] = count_parameters(state["params"])
  columns["memory_gib"] = f"{allocated(compiled) / 2**30:.2f}"
  jax.block_until_ready(state)
  when_ready()
  times = Run(compiled, state, batch).seconds_per_step(steps, runs)
  middle = statistics.median(times)
  columns["step_ms"] = f"{1e3 * middle:.2f}"
  columns["step_ms_range"] = f"{1e3 * min(times):.2f}-{1e3 * max(times):.2f}"
  columns["tokens_per_second"] = round(cfg.global_batch * cfg.seq_len / middle)
  return columns


def work(row: str, args) -> None:
  """One process: compiles, waits for its turn, measures, and prints a line of JSON."""
  settings = [*args.set, f"model.mixer={row.removesuffix(f' {NO_BORDERS}')}"]
  cfg = apply_overrides(load_config(args.config), settings)
  options = {"steps": args.steps, "runs": args.runs}
  columns = measure(row, cfg, args.kernels, turns.wait, **options)
  print(json.dumps(columns | {"device": jax.devices()[0].device_kind}), flush=True)


def main(arguments=None) -> list[dict]:
  """Measures, printing rows as they come; returns them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", default=CONFIG)
  parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
  parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, metavar="MIXER")
  parser.add_argument("--steps", type=int, default=10, help="steps in each timed run")
  parser.add_argument("--runs", type=int, default=5)
  parser.add_argument("--jobs", type=int, default=6, help="processes that compile at a time")
  parser.add_argument("--together", type=int, default=6, help="processes that wait to measure")
  parser.add_argument("--patience", type=float, default=600, help="seconds that they may compile")
  parser.add_argument("--out", type=Path, help="a CSV file")
  parser.add_argument("--keep", action="store_true", help="measure only what --out lacks")
  parser.add_argument("--worker", choices=ROWS, help=argparse.SUPPRESS)
  parser.add_argument("--kernels", type=Path, help=argparse.SUPPRESS)
  args = parser.parse_args(arguments)
  if args.worker:
    work(args.worker, args)
    return []

  # The first row alone: what it finds for the products that all models share, the others take over.
  rows = []
  if args.keep and args.out:  # those that have a time
    rows = csv_rows.read(args.out, without=[""], column="step_ms")
  missing = [row for row in args.only if row not in [columns["mixer"] for columns in rows]]
  groups = [missing[:1]]
  groups += [missing[n : n + args.together] for n in range(1, len(missing), args.together)]
  with tempfile.TemporaryDirectory() as kernels:
    options = ["--config", args.config, *(f"--set={setting}" for setting in args.set)]
    options += [f"--steps={args.steps}", f"--runs={args.runs}", "--kernels", kernels]
    print("  ".join(FIELDS), flush=True)
    told = False
    command = [sys.executable, "-m", "benchmarks.mixers", *options, "--worker"]
    for group in groups:
      measured = turns.take([[*command, row] for row in group], args.jobs, args.patience)
      for row, columns in zip(group, measured, strict=True):
        if "device" in columns and not told:
          told = True
          print(f"device: {columns['device']}, jax {jax.__version__}")
        csv_rows.add(rows, {"mixer": row} | columns, FIELDS, args.out)
  return rows


if __name__ == "__main__":
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU
  main()

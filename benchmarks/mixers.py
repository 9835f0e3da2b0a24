"""Training speed and memory of every mixer in one language model, in one run.

    python -m benchmarks.mixers --out docs/mixers.csv --jobs 8
    python -m benchmarks.mixers --only lnssm gla --set model.dim=1024

All that differs is the mixer: the model, the batch and the step are those of the configuration,
measured as `benchmarks.train_step` does. With `--jobs` the programs are compiled before, by several
processes, and found again in a folder; no process compiles while another measures. Memory is what
the compiler reserves for one step: arguments, results and everything between.

A row marked "no borders" leaves the documents' borders out of the batch: only then can softmax
attention run in cuDNN's kernel.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from benchmarks import csv_rows
from benchmarks.train_step import Run, compile_step, random_batch
from lnssm_jax.mixers import MIXERS
from lnssm_jax.models import count_parameters
from train import mesh as meshes
from train import overrides
from train.config import load_config
from train.step import build_model, init_state

CONFIG = "configs/lnssm_72m.py"
NO_BORDERS = "no borders"
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


def measure(row: str, cfg, kernels: Path, *, steps: int, runs: int) -> dict:
  """The columns of one row."""
  mesh = meshes.make_mesh(cfg)
  batch = random_batch(cfg, mesh, borders=NO_BORDERS not in row)
  compiled, seconds = compile_step(cfg, mesh, batch, kernels)
  columns = {"mixer": row, "state": state_size(cfg), "compile_s": f"{seconds:.1f}"}
  if not runs:
    return columns
  memory = compiled.memory_analysis()
  held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  columns["memory_gib"] = f"{(held + memory.temp_size_in_bytes) / 2**30:.2f}"
  state = init_state(cfg, mesh)
  columns["parameters"] = count_parameters(state["params"])
  times = Run(compiled, state, batch).seconds_per_step(steps, runs)
  middle = statistics.median(times)
  columns["step_ms"] = f"{1e3 * middle:.2f}"
  columns["step_ms_range"] = f"{1e3 * min(times):.2f}-{1e3 * max(times):.2f}"
  columns["tokens_per_second"] = round(cfg.global_batch * cfg.seq_len / middle)
  return columns


def compile_all(rows, arguments: list[str], cache: Path, jobs: int) -> None:
  """Fills the folder with the programs of these rows, by `jobs` processes at a time.

  A program that cannot be compiled is named again when its turn to be measured comes.
  """

  def compile_one(row):
    call = [sys.executable, "-m", "benchmarks.mixers", "--only", row, "--runs", "0", *arguments]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [*call, "--cache", str(cache)]
    subprocess.run(command, env=environment, capture_output=True, check=False)

  compile_one(rows[0])  # finds the choices of kernels that the others share
  with ThreadPoolExecutor(jobs) as pool:
    list(pool.map(compile_one, rows[1:]))


def main(arguments=None) -> list[dict]:
  """Measures, printing rows as they come; returns them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", default=CONFIG)
  parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
  parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, metavar="MIXER")
  parser.add_argument("--steps", type=int, default=10, help="steps in each timed run")
  parser.add_argument("--runs", type=int, default=5, help="0 compiles only")
  parser.add_argument("--jobs", type=int, default=0, help="processes that compile before")
  parser.add_argument("--cache", type=Path, help="folder of compiled programs")
  parser.add_argument("--out", type=Path, help="a CSV file")
  args = parser.parse_args(arguments)

  rows = []
  with tempfile.TemporaryDirectory() as scratch:
    cache = args.cache or Path(scratch)
    if args.jobs:
      settings = ["--config", args.config, *(f"--set={setting}" for setting in args.set)]
      compile_all(args.only, settings, cache, args.jobs)
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    print(f"device: {jax.devices()[0].device_kind}, jax {jax.__version__}", *FIELDS, sep="  ")
    base = overrides.apply(load_config(args.config), args.set)
    for row in args.only:
      name = row.removesuffix(f" {NO_BORDERS}")
      try:
        cfg = overrides.apply(base, [f"model.mixer={name}"])
        columns = measure(row, cfg, cache / "kernels", steps=args.steps, runs=args.runs)
      except Exception as reason:  # out of memory, a compiler's error: the other rows go on
        note = " ".join(f"{type(reason).__name__}: {reason}".split())[:300]
        columns = {"mixer": row, "note": note}
      rows.append({field: columns.get(field, "") for field in FIELDS})
      print("  ".join(str(value) or "-" for value in rows[-1].values()), flush=True)
      if args.out:
        csv_rows.write(args.out, FIELDS, rows)  # at once: a later failure loses nothing
  return rows


if __name__ == "__main__":
  main()

"""Training on 1, 2, 4, ... devices: tokens/s, efficiency, model FLOP utilization and memory.

    python -m benchmarks.scaling --config configs/lnssm_72m.py --devices 1 2 4 \\
      --axes data fsdp sequence

n devices get n times the rows of `global_batch`, and the mesh axis says how they divide the work:
by rows with copies of the parameters (`data`), by rows with divided parameters (`fsdp`) or experts
(`expert`), or by time (`sequence`); "fsdp x sequence" divides both ways, the first by 2, from 4
devices on. Efficiency is the tokens/s of n devices over n times those of one, in the same run. All
programs are compiled at the same time, and then measured one after the other.

Before anything is timed, three steps on n copies of one batch must give the losses and gradient
norms of one device on that batch; else the row says "wrong". Memory is the compiler's count for one
device: of the state and the batch, and of everything.
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import csv_rows, timing, train_step
from lnssm_jax.models import experts
from train import config
from train.cluster import device_mesh
from train.config import apply_overrides
from train.step import flops
from train.step.model import model_graph
from train.step.optimizer import make_optimizer
from train.step.state import abstract_state, init_state
from train.step.train_step import make_train_step

CHECKED_STEPS = 3
PRODUCT = " x "
# Relative, by the dtype of products. Devices add up in another order; Adam's first steps magnify
# that where a gradient is nearly 0.
LOSS_TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-3}
NORM_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
FIELDS = (
  "config",
  "axes",
  "devices",
  "rows",
  "seq_len",
  "step_ms",
  "tokens_per_second",
  "efficiency",
  "mfu",
  "state_gib",
  "total_gib",
  "loss",
  "device",
)


def mesh_of(axes: str, devices: int) -> config.Mesh:
  """The mesh of `devices` over one axis, or over two written "a x b", the first of them of 2.

  Raises:
    ValueError: an axis is unknown, or the devices cannot be divided so.
  """
  names, known = axes.split(PRODUCT), (*device_mesh.AXES, experts.AXIS)
  sizes = [devices] if len(names) == 1 else [2, devices // 2]
  if len(names) > 2 or not set(names) <= set(known) or math.prod(sizes) != devices:
    raise ValueError(
      f"axes={axes!r} on {devices} devices: name one of {', '.join(known)}, or two of "
      "them as 'fsdp x sequence' on an even number of devices."
    )
  return config.Mesh(**{"data": 1} | dict(zip(names, sizes, strict=True)))


def copies(batch: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
  """The rows of a batch `count` times over: the same mean loss, and the same gradient."""
  return {name: np.tile(array, (count, 1)) for name, array in batch.items()}


def compile_step(cfg: config.Train, mesh, batch, options: dict[str, str]):
  """The training step, compiled for batches like this one with these options of the compiler."""
  transform = make_optimizer(cfg.optimizer, cfg.steps)[0]
  step = make_train_step(cfg, model_graph(cfg.model), transform, mesh)
  return step.lower(abstract_state(cfg, mesh), batch).compile(compiler_options=options or None)


class Case(NamedTuple):
  """A mesh over some of the devices, with its program."""

  axes: str
  devices: int
  cfg: config.Train
  mesh: jax.sharding.Mesh
  batch: dict[str, jax.Array]
  compiled: jax.stages.Compiled


def compiled_case(cfg: config.Train, args: argparse.Namespace, axes: str, devices: int) -> Case:
  """The case with `devices` times the rows, compiled."""
  rows = cfg.global_batch
  cfg = dataclasses.replace(cfg, mesh=mesh_of(axes, devices), global_batch=rows * devices)
  mesh = device_mesh.make_mesh(cfg)
  batch = jax.device_put(
    copies(train_step.random_arrays(rows, cfg.seq_len, cfg.model.vocab_size), devices),
    device_mesh.batch_sharding(mesh),
  )
  options = dict(option.split("=", 1) for option in args.xla)
  return Case(axes, devices, cfg, mesh, batch, compile_step(cfg, mesh, batch, options))


def measure(case: Case, args: argparse.Namespace, first):
  """One row of the table, and the metrics of the checked steps.

  Args:
    first: (the row, the metrics) of one device, or None for that device itself.
  """
  axes, devices, cfg, mesh, batch, compiled = case
  run = train_step.Run(compiled, init_state(cfg, mesh), batch)
  metrics = []
  for _ in range(CHECKED_STEPS):
    done = run.steps(1)
    metrics.append([float(done["loss"]), float(done["grad_norm"])])
  chips = list(mesh.devices.flat)
  row = {
    "config": Path(args.config).stem,
    "axes": axes if devices > 1 else "-",
    "devices": str(devices),
    "rows": str(cfg.global_batch),
    "seq_len": str(cfg.seq_len),
    "state_gib": f"{compiled.memory_analysis().argument_size_in_bytes / 2**30:.2f}",
    "total_gib": f"{timing.allocated(compiled) / 2**30:.2f}",
    "loss": f"{metrics[-1][0]:.5f}",
    "device": chips[0].device_kind,
  }
  if not agrees(metrics, metrics if first is None else first[1], cfg.model.dtype):
    return row | {"step_ms": "wrong"}, metrics
  seconds = statistics.median(run.seconds_per_step(args.steps, args.runs))
  speed = cfg.global_batch * cfg.seq_len / seconds
  alone = speed if first is None else float(first[0]["tokens_per_second"])
  per_token = flops.model_flops_per_token(cfg.model, cfg.seq_len)
  mfu = flops.utilization(per_token, speed, chips)
  if args.profile:
    profiled = lambda: run.steps(args.steps)
    train_step.print_profile(compiled.as_text(), profiled, args.steps * devices, seconds)
  return row | {
    "step_ms": f"{seconds * 1e3:.2f}",
    "tokens_per_second": f"{speed:.0f}",
    "efficiency": f"{speed / (devices * alone):.3f}",
    "mfu": "-" if mfu is None else f"{mfu:.3f}",
  }, metrics


def agrees(metrics: Sequence, want: Sequence, dtype: str) -> bool:
  """Whether (loss, norm of the gradient) of each checked step are those of one device."""
  errors = np.abs(np.asarray(metrics) / np.asarray(want) - 1)
  return bool((errors <= (LOSS_TOLERANCE[dtype], NORM_TOLERANCE[dtype])).all())  # NaN is not


def main(arguments: Sequence[str] | None = None) -> list[dict[str, str]]:
  """Measures, prints a line a mesh, and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", required=True)
  parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
  parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
  parser.add_argument("--axes", nargs="+", default=["data", "fsdp", "sequence"])
  parser.add_argument("--steps", type=int, default=20, help="steps in each timed run")
  parser.add_argument("--runs", type=int, default=5)
  parser.add_argument("--xla", action="append", default=[], metavar="OPTION=VALUE")
  parser.add_argument("--profile", action="store_true", help="name the kernels that take the time")
  parser.add_argument("--out", type=Path, help="write the rows to this CSV file")
  args = parser.parse_args(arguments)
  cfg = apply_overrides(config.load_config(args.config), args.set)

  print(" ".join(f"{field:>{_width(field)}}" for field in FIELDS), flush=True)
  meshes = [
    (axes, devices)
    for devices in sorted({1, *args.devices})
    for axes in (args.axes if devices > 1 else args.axes[:1])
    if PRODUCT not in axes or devices >= 4
  ]
  rows, first = [], None
  with ThreadPoolExecutor() as pool:
    cases = list(pool.map(lambda mesh: compiled_case(cfg, args, *mesh), meshes))
  for case in cases:
    row, metrics = measure(case, args, first)
    first = first or (row, metrics)
    rows.append({field: row.get(field, "-") for field in FIELDS})
    print(" ".join(f"{rows[-1][x]:>{_width(x)}}" for x in FIELDS), flush=True)
  if args.out is not None:
    csv_rows.write(args.out, FIELDS, rows)
  return rows


def _width(field: str) -> int:
  return {"axes": 15, "device": 11}.get(field, max(len(field), 8))


if __name__ == "__main__":
  main()

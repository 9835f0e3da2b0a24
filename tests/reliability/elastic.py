"""Stops a run on some devices, processes and mesh, and resumes on others.

    python -m tests.reliability.elastic
    python -m tests.reliability.elastic --platform gpu --layouts 0 1 3  # on two GPUs

For every pair: the loaded parameters and optimizer state must equal the saved ones bit for bit; the
rows of text that are read must be those of an uninterrupted run (by hash); the losses may differ by
the order of summation, at most by `--most`. Products of matrices on GPUs are those of float32.
"""

import argparse
import dataclasses
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from tests.reliability import platforms, processes, tiny_run
from train import config

# Name: devices, processes, mesh axes (data, fsdp, sequence).
LAYOUTS = {
  "1 device": (1, 1, (1, 1, 1)),
  "2 devices, sequence 2": (2, 1, (1, 1, 2)),
  "4 devices, data 2 x fsdp 2": (4, 1, (2, 2, 1)),
  "2 processes x 1, data 2": (2, 2, (2, 1, 1)),
  "2 processes x 2, fsdp 4": (4, 2, (1, 4, 1)),
  "4 processes x 1, fsdp 2 x sequence 2": (4, 4, (1, 2, 2)),
}


def digest(state) -> str:
  """SHA-256 of all (unsharded) arrays of a state, in the order of their paths."""
  import jax
  import numpy as np
  from jax.experimental import multihost_utils

  sha = hashlib.sha256()
  for leaf in jax.tree.leaves(state):
    whole = multihost_utils.process_allgather(leaf, tiled=True)
    sha.update(np.ascontiguousarray(whole).tobytes())
  return sha.hexdigest()


def train(cfg: config.Train, until: int, out: Path) -> None:
  """Trains up to `until`; records what was loaded, read and saved."""
  import os
  import signal

  import jax

  from train import trainer

  record = {"rows": {}, "loaded": None}
  train_batches, begin, push = trainer.train_batches, trainer._begin, trainer.MetricReader.push

  def watched(windows, *, rows, start, **options):
    batches = train_batches(windows, rows=rows, start=start, **options)
    for step, batch in enumerate(batches, start + 1):
      for row, values in zip(rows, zip(*batch.values(), strict=True), strict=True):
        text = b"".join(value.tobytes() for value in values)
        record["rows"][f"{step} {row}"] = hashlib.sha256(text).hexdigest()
      yield batch

  def begin_and_look(*arguments):
    state, *rest = begin(*arguments)
    record["loaded"] = digest(state)
    return state, *rest

  def push_and_stop(self, step, metrics):
    if step == until - 2:  # the others learn of it two steps later
      os.kill(os.getpid(), signal.SIGTERM)
    push(self, step, metrics)

  trainer.train_batches, trainer._begin = watched, begin_and_look
  trainer.MetricReader.push = push_and_stop
  result = trainer.fit(cfg)
  record |= {"step": result.step, "saved": digest(result.state)}
  (out / f"record-{jax.process_index()}.json").write_text(json.dumps(record))


def run(cfg: config.Train, layout: str, until: int, root: Path) -> dict:
  """Runs one part of a run; returns the merged records of its processes."""
  devices, count, (data, fsdp, sequence) = LAYOUTS[layout]
  cfg = dataclasses.replace(cfg, mesh=config.Mesh(data=data, fsdp=fsdp, sequence=sequence))
  log = root / "log.txt"
  children = processes.start(train, cfg, until, root, processes=count, devices=devices, log=log)
  processes.join(children, log)
  record = [json.loads((root / f"record-{i}.json").read_text()) for i in range(count)]
  rows: dict[str, str] = {}
  for one in record:
    both = rows.keys() & one["rows"].keys()  # processes that have parts of a sequence read it whole
    if any(rows[row] != one["rows"][row] for row in both):
      raise RuntimeError("two processes read the same row differently")
    rows |= one["rows"]
    if (one["loaded"], one["saved"]) != (record[0]["loaded"], record[0]["saved"]):
      raise RuntimeError("processes see different states")
  return record[0] | {"rows": rows}


def main(arguments: list[str] | None = None) -> int:
  """Prints a line per pair; returns 1 if a bit or a row differed, or a loss by too much."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  numbered = ", ".join(f"{i}: {name}" for i, name in enumerate(LAYOUTS))
  parser.add_argument("--layouts", type=int, nargs="+", default=range(len(LAYOUTS)), help=numbered)
  parser.add_argument("--steps", type=int, default=20, help="before and after the change")
  parser.add_argument("--most", type=float, default=1e-5, help="difference of a loss")
  platforms.add_option(parser)
  options = parser.parse_args(arguments)
  platforms.use(options.platform)
  if platforms.is_gpu():
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
  layouts = [list(LAYOUTS)[i] for i in options.layouts]
  wrong = 0
  with tempfile.TemporaryDirectory() as name:
    root = Path(name)
    processes.share_compilations(root / "compiled")
    settings = {"steps": 1000, "checkpoint_every": 1000}
    whole = tiny_run.settings(root, "whole", **settings)
    reference = run(whole, "1 device", 2 * options.steps, root)
    losses = tiny_run.curve(whole)
    for old in layouts:
      stopped = tiny_run.settings(root, "stopped", **settings)
      first = run(stopped, old, options.steps, root)
      for new in layouts:
        shutil.copytree(stopped.run_dir, root / "resumed")
        resumed = tiny_run.settings(root, "resumed", **settings)
        second = run(resumed, new, 2 * options.steps, root)
        # A batch that was read ahead, and not used, is read again.
        rows = {**first["rows"], **second["rows"]}
        common = [row for row in reference["rows"] if int(row.split()[0]) <= 2 * options.steps - 2]
        same_text = all(rows[row] == reference["rows"][row] for row in common)
        same_bits = first["saved"] == second["loaded"]
        curve = tiny_run.curve(resumed)
        difference = max(abs(curve[s][0] - losses[s][0]) for s in curve if s in losses)
        wrong += not (same_text and same_bits and difference <= options.most)
        print(f"{old} -> {new}: stopped after {first['step']}, state "
              f"{'bit-equal' if same_bits else 'DIFFERENT'}, {len(common)} rows of text "
              f"{'the same' if same_text else 'DIFFERENT'}, loss differs by at most "
              f"{difference:.1e} up to step {max(curve)}", flush=True)  # fmt: skip
        shutil.rmtree(resumed.run_dir)
      shutil.rmtree(stopped.run_dir)
  return int(wrong > 0)


if __name__ == "__main__":
  raise SystemExit(main())

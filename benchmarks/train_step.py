"""Speed, memory and profile of a training step on random tokens.

    python -m benchmarks.train_step --config configs/lnssm_72m.py
    python -m benchmarks.train_step --config configs/lnssm_72m.py --set global_batch=64 --profile

Prints tokens/s (the median of several runs of steps), seconds for the paper's epoch of 10.24M
tokens, the device's peak memory, and model FLOP utilization by the formula of
`train/step/flops.py`.
Random tokens cost what real ones cost; what the data pipeline costs on top, `fit` shows.
"""

import argparse
import collections
import json
import statistics
import time
from pathlib import Path

import jax
import numpy as np

from train import config
from train.cluster import compile_cache, device_mesh
from train.config import apply_overrides, load_config
from train.logging import profiles
from train.step import flops
from train.step.model import model_graph
from train.step.optimizer import make_optimizer
from train.step.state import abstract_state, init_state
from train.step.train_step import make_train_step

PAPER_EPOCH_TOKENS = 10_240_000


def random_batch(cfg, mesh, seed=0, *, boundaries=True):
  """A batch of random tokens, with a document boundary about every 500 tokens, or with none."""
  batch = random_arrays(cfg.global_batch, cfg.seq_len, cfg.model.vocab_size, seed)
  if not boundaries:
    batch["segment_ids"] = None
  return jax.device_put(batch, device_mesh.batch_sharding(mesh))


def random_arrays(rows, length, vocab_size, seed=0):
  """The arrays of such a batch, with boundaries, on the host."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, vocab_size, (rows, length + 1), dtype=np.int32)
  return {
    "tokens": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "segment_ids": np.cumsum(rng.random((rows, length)) < 1 / 500, axis=1).astype(np.int32),
    "weights": np.ones((rows, length), np.float32),
  }


def length_of_documents(batch) -> float:
  """The length of rows of one document whose tokens see as many others as those of this batch."""
  if batch["segment_ids"] is None:
    return batch["tokens"].shape[1]
  lengths = [np.unique(row, return_counts=True)[1] for row in np.asarray(batch["segment_ids"])]
  return float(sum((x**2).sum() for x in lengths) / batch["tokens"].size)


def compile_step(cfg, mesh, batch, kernels: Path | None = None):
  """The training step, compiled for batches like this one, and the seconds that it took.

  `kernels` is a folder that keeps the compiler's choices of kernels, as a run folder does.
  """
  transform = make_optimizer(cfg.optimizer, cfg.steps)[0]
  step = make_train_step(cfg, model_graph(cfg.model), transform, mesh, kernels)
  begin = time.perf_counter()
  arguments = abstract_state(cfg, mesh), batch
  compiled = compile_cache.compiled(step, arguments, mesh, config.to_dict(cfg))
  return compiled, time.perf_counter() - begin


class Run:
  """A compiled step, called again and again on one batch."""

  def __init__(self, compiled, state, batch):
    self._compiled, self._state, self._batch = compiled, state, batch

  def steps(self, count: int):
    """Metrics of the last of `count` steps; does not wait for them."""
    for _ in range(count):
      self._state, metrics = self._compiled(self._state, self._batch)
    return metrics

  def seconds_per_step(self, steps: int, runs: int) -> list[float]:
    """One number for each of `runs` runs.

    Raises:
      FloatingPointError: the loss is not finite; there is no time for a wrong result.
    """
    loss = float(self.steps(3)["loss"])
    if not np.isfinite(loss):
      raise FloatingPointError(f"the loss is {loss} after 3 steps: a wrong result has no time.")
    seconds = []
    for _ in range(runs):
      begin = time.perf_counter()
      jax.block_until_ready(self.steps(steps))
      seconds.append((time.perf_counter() - begin) / steps)
    return seconds


def main():
  """Measures one configuration and prints a line of JSON last."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", required=True)
  parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
  parser.add_argument("--steps", type=int, default=20, help="steps in each timed run")
  parser.add_argument("--runs", type=int, default=5)
  parser.add_argument("--no-boundaries", action="store_true", help="every row is one document")
  parser.add_argument("--profile", action="store_true", help="name the kernels that take the time")
  args = parser.parse_args()
  cfg = apply_overrides(load_config(args.config), args.set)

  mesh = device_mesh.make_mesh(cfg)
  batch = random_batch(cfg, mesh, boundaries=not args.no_boundaries)
  compiled, compile_seconds = compile_step(cfg, mesh, batch)
  run = Run(compiled, init_state(cfg, mesh), batch)
  seconds = run.seconds_per_step(args.steps, args.runs)

  devices = list(mesh.devices.flat)
  step_seconds = statistics.median(seconds)
  tokens_per_second = cfg.global_batch * cfg.seq_len / step_seconds
  memory = (devices[0].memory_stats() or {}).get("peak_bytes_in_use")
  per_token = flops.model_flops_per_token(cfg.model, round(length_of_documents(batch)))
  result = {
    "device": f"{devices[0].device_kind} x {len(devices)}",
    "global_batch": cfg.global_batch,
    "seq_len": cfg.seq_len,
    "remat": cfg.model.remat,
    "compile_seconds": round(compile_seconds, 1),
    "step_ms": round(step_seconds * 1e3, 2),
    "step_ms_range": [round(min(seconds) * 1e3, 2), round(max(seconds) * 1e3, 2)],
    "tokens_per_second": round(tokens_per_second),
    "seconds_per_paper_epoch": round(PAPER_EPOCH_TOKENS / tokens_per_second, 1),
    "peak_memory_gib": None if memory is None else round(memory / 2**30, 2),
    "mfu": flops.utilization(per_token, tokens_per_second, devices),
  }
  if args.profile:
    print_profile(compiled.as_text(), lambda: run.steps(5), 5, step_seconds)
  print(json.dumps(result))


def print_profile(text, run, steps, step_seconds):
  """Prints the device time of one step by part of the model, then by kernel."""
  events = profiles.traced(run)
  paths = profiles.paths_of_instructions(text)
  kernels, launches = collections.Counter(), collections.Counter()
  for event in events:
    key = event.kernel, profiles.path_of(event, paths)
    kernels[key] += event.seconds
    launches[key] += 1
  busy = sum(kernels.values())
  print(f"device busy {busy / steps * 1e3:.2f} ms of {step_seconds * 1e3:.2f} ms per step")
  print(*profiles.summary(events, text, steps), sep="\n")
  for (kernel, path), seconds in kernels.most_common(40):
    count = launches[kernel, path] / steps
    print(f"{seconds / steps * 1e3:8.3f} ms  x{count:<5.0f} {kernel[:48]:48} {path[-110:]}")


if __name__ == "__main__":
  main()

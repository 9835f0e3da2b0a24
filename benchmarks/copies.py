"""Copies that train as one program, next to one copy alone: compilation and speed.

    python -m benchmarks.copies
    python -m benchmarks.copies --config experiments/sweeps/lm_lnssm.py --copies 1 3 --steps 5

The first run of a sweep, with random tokens in place of text. Times are the least of several
steps; on a CPU, which may be shared, they are of CPU time of all threads. "gain" is copies trained
per second relative to one copy, and with compilation included for a run of `--total` steps.
"""

import argparse
import time
from pathlib import Path

import jax
import numpy as np

from train.step.copies import Copies
from train.sweeps import spec

DEFAULT = Path(__file__).parents[1] / "experiments" / "sweeps" / "mqar_dsf.py"


def measure(cfg, batch, count: int, steps: int) -> tuple[float, float]:
  """Seconds of compilation, initialization included, and of a step of `count` copies."""
  clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
  begin = clock()
  runs = [(seed, cfg.optimizer.peak_lr) for seed in range(count)]
  copies = Copies(cfg, runs=runs)
  copies.compile(batch)
  jax.block_until_ready(copies.state)
  compiled, times = clock() - begin, []
  for _ in range(steps + 1):
    begin = clock()
    jax.block_until_ready(copies.step(batch))
    times.append(clock() - begin)
  return compiled, min(times[1:])


def _text(cfg) -> dict[str, np.ndarray]:
  """A batch of random tokens and the tokens after them."""
  shape = cfg.global_batch, cfg.seq_len
  tokens = np.random.default_rng(0).integers(0, cfg.model.vocab_size, shape, np.int32)
  return {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1)}


def main(arguments=None) -> list[dict[str, float]]:
  """Prints a line per number of copies; returns them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", default=str(DEFAULT), help="a sweep's file")
  parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
  parser.add_argument("--copies", type=int, nargs="+", default=[1, 3, 9])
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--total", type=int, default=1560)
  args = parser.parse_args(arguments)
  run = spec.load(args.config, changes=args.set).runs[0]
  cfg = run.cfg
  batch = run.task.batch(cfg) if run.task else _text(cfg)
  rows = []
  for count in args.copies:
    compiled, step = measure(cfg, batch, count, args.steps)
    rows.append({"copies": count, "compile": compiled, "step": step})
    of_run = lambda row: (row["compile"] + args.total * row["step"]) / row["copies"]
    first, last = rows[0], rows[-1]
    gain = first["step"] / first["copies"] / (last["step"] / last["copies"])
    print(
      f"{count} copies: compiled in {compiled:.1f} s, {1000 * step:.1f} ms per step, gain"
      f" {gain:.2f}, with compilation {of_run(first) / of_run(last):.2f}",
      flush=True,
    )
  return rows


if __name__ == "__main__":
  main()

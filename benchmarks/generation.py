"""Speed and memory of generation by the recurrent state, against length and batch.

    python -m benchmarks.generation --config configs/lnssm_72m.py

For each batch and each number of new tokens: tokens/s over all rows and milliseconds per token, the
bytes of the state, and the device's peak memory. A model whose cost is linear in length shows the
same milliseconds per token and the same state in every row of one batch.
"""

import argparse
import contextlib
import importlib
import json
import statistics
import time
from unittest import mock

import jax
import numpy as np

from lnssm_jax.generate import SamplingOptions, generate
from train.config import apply_overrides, load_config
from train.step.model import build_model

SCANS_WITH_STEPS = ("delta_rule", "linear_attention", "longhorn_scan", "selective_scan", "wkv4")


def main():
  """Prints one line of JSON per batch and length."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", required=True)
  parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
  parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024])
  parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
  parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
  args = parser.parse_args()
  cfg = apply_overrides(load_config(args.config), args.set)
  model = build_model(cfg.model, jax.random.key(0))
  for batch in args.batches:
    for result in measure(model, batch, args.prompt, args.lengths):
      print(json.dumps(result), flush=True)


def measure(model, batch, prompt_length, lengths):
  """Yields one result per length: the median of three runs after one that compiles."""
  prompts = np.random.default_rng(0).integers(0, model.vocab_size, (batch, prompt_length))
  state = jax.eval_shape(lambda: model.init_state(batch))
  state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
  generate(model, list(prompts), SamplingOptions(max_tokens=32))
  for length in lengths:
    seconds = []
    for _ in range(3):
      begin = time.perf_counter()
      rows = generate(model, list(prompts), SamplingOptions(max_tokens=length))
      seconds.append(time.perf_counter() - begin)
    if any(len(row) != length for row in rows):
      raise SystemExit(f"asked for {length} tokens, got {[len(row) for row in rows]}.")
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
    yield {
      "device": device.device_kind,
      "batch": batch,
      "new_tokens": length,
      "tokens_per_second": round(batch * length / statistics.median(seconds)),
      "ms_per_token": round(statistics.median(seconds) / length * 1e3, 4),
      "state_mib": round(state_bytes / 2**20, 3),
      "peak_memory_gib": None if memory is None else round(memory / 2**30, 3),
    }


@contextlib.contextmanager
def single_steps(*, kernels: bool):
  """`implementation=None` takes the kernels for T = 1 wherever they can run, or nowhere."""
  with contextlib.ExitStack() as stack:
    for scan in SCANS_WITH_STEPS:
      module = importlib.import_module(f"lnssm_jax.ops.{scan}.pallas")
      stack.enter_context(mock.patch.object(module, "preferred", _preferred(module, kernels)))
    jax.clear_caches()  # programs of before have chosen otherwise
    yield
  jax.clear_caches()


def _preferred(module, kernels):
  usual = module.preferred

  def preferred(inputs, options):
    return kernels if inputs[0].shape[1] == 1 else usual(inputs, options)

  return preferred


if __name__ == "__main__":
  main()

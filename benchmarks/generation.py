"""Speed and memory of generation by the recurrent state, against length and batch.

    python -m benchmarks.generation --config configs/lnssm_72m.py
    python -m benchmarks.generation --body gla delta_net mamba2 --prompt 2048
    python -m benchmarks.generation --body gla delta_net mamba2 --prompt 2048 --together --no-peers

For each batch and each number of new tokens: tokens/s over all rows and milliseconds per token, the
bytes of the state, and the device's peak memory. A model whose cost is linear in length shows the
same milliseconds per token and the same state in every row of one batch.

With `--body`, models of `benchmarks.model_step` with bfloat16 parameters: milliseconds to read the
prompt and milliseconds per token after it, then fla's `generate` where that is installed
(`benchmarks.model_peers`, which tunes for minutes unless `--no-tune` finds what an earlier call
tuned; `--no-own` measures it alone).

Before a time is printed, the logits after the prompt are compared with those of the same parameters
in float32, read in one piece: they may be as far from these as bfloat16 takes them without kernels,
12 % of their norm in 24 layers of an untrained GLA. The two models of the comparison run their
layers in a loop, which compiles in seconds; what is timed runs as in `read` and `generate`, on a
GPU without a loop, and takes 25 to 40 s for each of its two programs. With `--together` each body
and batch compiles in a process of its own, next to the others, and is then compared and timed
alone.
"""

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import model_peers, turns
from benchmarks.model_step import BODIES, Sizes, settings
from lnssm_jax import ops as all_ops
from lnssm_jax.generate import SamplingOptions, generate, read
from lnssm_jax.ops.core import dispatch
from lnssm_jax.prefill import default_prefill_chunk
from train.config import apply_overrides, load_config
from train.step.model import build_model, model_graph, params_of

# Of the logits after the prompt: errors against float32, in units of that without kernels.
LOGIT_TOLERANCE = 1.25
COMPARED_ROWS = 4  # whose logits are compared, at most
# The ops of which a kernel runs a single token.
DECODES = [op for op in dispatch.names() if dispatch.fact(op, "decodes")]


def main(arguments=None):
  """Prints a line of JSON per batch and length, or per body and batch; returns those of bodies."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  models = parser.add_mutually_exclusive_group(required=True)
  models.add_argument("--config")
  models.add_argument("--body", nargs="+", choices=list(BODIES))
  parser.add_argument("--sizes", default="", metavar="dim=64,num_layers=2", help="of bodies")
  parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
  parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024])
  parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
  parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
  parser.add_argument("--new", type=int, default=128, help="new tokens of a body: 32 n")
  parser.add_argument("--prefill-chunks", type=int, nargs="+", default=[])
  parser.add_argument("--together", action="store_true", help="bodies compile side by side")
  parser.add_argument("--own", action=argparse.BooleanOptionalAction, default=True)
  parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
  parser.add_argument(
    "--tune",
    action=argparse.BooleanOptionalAction,
    default=True,
    help="tune each peer in a process of its own first",
  )
  parser.add_argument("--in-turn", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args(arguments)
  if args.body:
    rows = []
    for row in _of_bodies(args):
      print(json.dumps(row), flush=True)
      rows.append(row)
    return rows
  cfg = apply_overrides(load_config(args.config), args.set)
  model = build_model(cfg.model, jax.random.key(0))
  for batch in args.batches:
    for result in measure(model, batch, args.prompt, args.lengths):
      print(json.dumps(result), flush=True)
  return []


def _of_bodies(args) -> Iterator[dict[str, Any]]:
  """Our rows as they are measured, then the peers'."""
  cases = [
    (name, batch, chunk)
    for name in (args.body if args.own else ())
    for batch in args.batches
    for chunk in args.prefill_chunks or [default_prefill_chunk(batch)]
  ]
  for (name, batch, chunk), row in (_together if args.together else _one_by_one)(cases, args):
    yield {"body": name, "who": "lnssm_jax", "batch": batch, "prefill_chunk": chunk} | row
  for name in args.body if args.peers else ():
    for row in model_peers.generation(name, args.batches, args.prompt, args.new, tune=args.tune):
      yield {"body": name} | row


def _one_by_one(cases, args):
  sizes = Sizes.parse(args.sizes) if args.sizes else None
  when_compiled = turns.wait if args.in_turn else lambda: None
  for case in cases:
    name, batch, chunk = case
    model = settings(BODIES[name], sizes).model
    try:
      row = phases(model, batch, args.prompt, args.new, chunk, when_compiled)
    except FloatingPointError as reason:  # the other bodies go on
      row = {"note": str(reason)}
    yield case, row


def _together(cases, args):
  def command(name, batch, chunk):
    given = {
      "--body": name,
      "--batches": batch,
      "--prefill-chunks": chunk,
      "--prompt": args.prompt,
      "--new": args.new,
      "--sizes": args.sizes,
    }
    options = [str(part) for pair in given.items() for part in pair]
    return [sys.executable, "-m", "benchmarks.generation", *options, "--no-peers", "--in-turn"]

  for group in itertools.batched(cases, turns.AT_ONCE):  # the first are measured soon
    yield from zip(group, turns.take([command(*case) for case in group]), strict=True)


def prompts_of(model, batch: int, length: int) -> list[np.ndarray]:
  """Random prompts of a model, or of its settings."""
  return list(np.random.default_rng(0).integers(0, model.vocab_size, (batch, length)))


def compared_model(cfg, prompts: Sequence[np.ndarray]):
  """(bfloat16 model, logits after the prompts in float32, error of bfloat16 without kernels)."""
  loop = dataclasses.replace(cfg, unroll=1)
  cast = lambda params, dtype: jax.tree.map(lambda x: x.astype(dtype), params)
  params = cast(params_of(build_model(loop, jax.random.key(0))), jnp.bfloat16)
  model = lambda cfg, params: nnx.merge(model_graph(cfg), params)
  wide = model(dataclasses.replace(loop, dtype="float32"), cast(params, jnp.float32))
  want = read(wide, prompts, prefill_chunk=max(map(len, prompts))).logits
  with choosing(folders_with_kernels(), lambda inputs: False):
    looped = model(dataclasses.replace(loop, param_dtype="bfloat16"), params)
    rounding = relative_error(read(looped, prompts).logits, want)
  return model(dataclasses.replace(cfg, param_dtype="bfloat16"), params), want, rounding


def relative_error(got, want) -> float:
  """Norm of the difference over that of `want`, on the host: it compiles nothing."""
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def phases(
  cfg,
  batch: int,
  prompt_length: int,
  new_tokens: int,
  prefill_chunk: int,
  when_compiled: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
  """Milliseconds to read prompts, and per token drawn after them, greedily; medians of three.

  Args:
    when_compiled: called when all programs are compiled, before the logits are compared.

  Raises:
    FloatingPointError: logits after the prompt are further from those of the same parameters in
      float32 than rounding takes them.
  """
  begin = time.perf_counter()
  prompts = prompts_of(cfg, batch, prompt_length)
  model, want, rounding = compared_model(cfg, prompts[:COMPARED_ROWS])
  reads = lambda: jax.block_until_ready(read(model, prompts, prefill_chunk=prefill_chunk))
  prefix = reads()
  options = SamplingOptions(max_tokens=new_tokens, temperature=0)
  draws = lambda: generate(model, [[]] * batch, options, start=prefix)
  draws()
  compiled = time.perf_counter()
  when_compiled()
  found = relative_error(np.asarray(reads().logits)[:COMPARED_ROWS], want)
  if not found <= LOGIT_TOLERANCE * rounding:
    raise FloatingPointError(
      f"logits after the prompt differ by {found:.1e} of their norm from those in float32, and "
      f"without kernels by {rounding:.1e}: a wrong result has no time."
    )
  return {
    "device": jax.devices()[0].device_kind,
    "prompt": prompt_length,
    "prefill_ms": round(1e3 * _median_seconds(reads), 2),
    "decode_ms": round(1e3 * _median_seconds(draws) / new_tokens, 4),
    "logit_error": round(found, 5),
    "logit_error_without_kernels": round(rounding, 5),
    "compile_s": round(compiled - begin, 1),
  }


def _median_seconds(run) -> float:
  seconds = []
  for _ in range(3):
    begin = time.perf_counter()
    run()
    seconds.append(time.perf_counter() - begin)
  return statistics.median(seconds)


def measure(model, batch, prompt_length, lengths):
  """Yields one result per length: the median of three runs after one that compiles."""
  prompts = prompts_of(model, batch, prompt_length)
  state = jax.eval_shape(lambda: model.init_state(batch))
  state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
  generate(model, prompts, SamplingOptions(max_tokens=32))
  for length in lengths:
    rows = []
    draws = lambda length=length, rows=rows: rows.extend(
      generate(model, prompts, SamplingOptions(max_tokens=length))
    )
    seconds = _median_seconds(draws)
    if any(len(row) != length for row in rows):
      raise SystemExit(f"asked for {length} tokens, got {[len(row) for row in rows]}.")
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
    yield {
      "device": device.device_kind,
      "batch": batch,
      "new_tokens": length,
      "tokens_per_second": round(batch * length / seconds),
      "ms_per_token": round(seconds / length * 1e3, 4),
      "state_mib": round(state_bytes / 2**20, 3),
      "peak_memory_gib": None if memory is None else round(memory / 2**30, 3),
    }


def folders_with_kernels() -> list[str]:
  """The folders of `lnssm_jax.ops` with kernels: those of ops, norms and losses."""
  return sorted(path.parent.name for path in Path(all_ops.__file__).parent.glob("*/pallas.py"))


@contextlib.contextmanager
def choosing(ops: Sequence[str], kernels: Callable[[Any], bool | None]):
  """`implementation=None` takes the kernels of these ops, which can run, or not; None: as usual.

  Args:
    kernels: a function of an op's inputs.
  """

  def preferred(module):
    usual = module.preferred

    def preferred(inputs, options):
      chosen = kernels(inputs)
      return usual(inputs, options) if chosen is None else chosen

    return preferred

  with contextlib.ExitStack() as stack:
    for op in ops:
      module = importlib.import_module(f"lnssm_jax.ops.{op}.pallas")
      stack.enter_context(mock.patch.object(module, "preferred", preferred(module)))
    jax.clear_caches()  # programs of before have chosen otherwise
    yield
  jax.clear_caches()


def single_steps(*, kernels: bool):
  """`implementation=None` takes the kernels for T = 1 wherever they can run, or nowhere."""
  return choosing(DECODES, lambda inputs: kernels if inputs[0].shape[1] == 1 else None)


if __name__ == "__main__":
  if "--together" in sys.argv or "--in-turn" in sys.argv:  # processes share the GPU
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  main()

"""Training speed of whole models with the default settings, next to those of peers.

    python -m benchmarks.model_step --out docs/model_step.csv           # all bodies, minutes each
    python -m benchmarks.model_step --only gla delta_net --no-peers
    python -m benchmarks.model_step --together --no-peers  # compile at once, then measure in turn
    python -m benchmarks.model_step --only gla --no-documents
    python -m benchmarks.model_step --only gla --sizes rows=16,length=2048 rows=4,length=8192

A body is 24 layers of 1,024 with SwiGLU of 2,816 and a vocabulary of 32,000: 16 sequences of 2,048
random tokens per step, in documents of about 500 as the trainer packs them, or with
`--no-documents` one per row, which fla is always measured with; bfloat16 products over float32
parameters, AdamW, clipping. Nothing else is set: what a user gets without a knob is what is
measured.

Each body runs in a process of its own, so that its peak memory is its own, with an empty compile
cache ("cold"); a second process takes its first step with the cache that the first one filled
("warm"). Both times are from the end of the imports to the end of the first step, and are not
measured with `--together`. Before a time is printed, the losses of three steps with one document
per row, of all but the first quarter of it, are compared with those of the same model under another
policy of rematerialization, and all must be finite. MFU is 3 * forward FLOPs per token * tokens/s
over the device's bfloat16 peak (`train.step.flops`); a token attends to its own document. The
budget is the device time of one step: library products, with the rate that they reach next to that
of one large product; our kernels; everything else by the place in the model that it comes from.

Where they are installed, `benchmarks.model_jla` measures jax-linear-attention's model of the same
sizes, and `benchmarks.model_peers` fla's, eager and compiled.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import csv_rows, model_jla, model_peers, turns
from benchmarks.timing import milliseconds
from benchmarks.train_step import Run, compile_step, length_of_documents, random_batch
from pallas_kernels.core import device
from train.cluster import device_mesh
from train.config import Data, Model, Optimizer, Train
from train.logging import profiles
from train.step import flops
from train.step.model import build_model
from train.step.state import init_state

LOSS_TOLERANCE = 2e-3  # nats, of three steps: bfloat16 products round differently when recomputed
FIELDS = (
  "body", "sizes", "who", "documents", "parameters", "step_ms", "tokens_per_second", "mfu",
  "peak_gib", "cold_s", "warm_s", "products_ms", "products_tflops", "kernels_ms", "rest_ms",
  "loss_difference", "note",
)  # fmt: skip

# Kernels of libraries, by the names that the profiler shows.
_PRODUCTS = re.compile(r"nvjet|cutlass|cublas|sm\d+_xmma|gemm")
_OWN = re.compile(r"mosaic_gpu")


class Body(NamedTuple):
  """A mixer in the common body, or in one of other sizes."""

  mixer: str | tuple[str, ...]
  num_heads: int
  options: dict[str, Any] = {}  # noqa: RUF012
  sizes: dict[str, int] = {}  # noqa: RUF012
  experts: dict[str, int] = {}  # noqa: RUF012


_LARGE = {"dim": 2048, "channel_hidden": 5632}
_EXPERTS = {"num_experts": 16, "experts_per_token": 4}
BODIES = {
  "gla": Body("gla", 4),
  "delta_net": Body("delta_net", 8),
  "gated_delta_net": Body("gated_delta_net", 6, {"head_dim": 128}),
  "retnet": Body("retnet", 8, {"expand_v": 1.0}),
  "mamba2": Body("mamba2", 8),
  "mamba": Body("mamba", 8),
  "softmax_attention": Body("softmax_attention", 8),
  "sliding_window_attention": Body("sliding_window_attention", 8, {"window": 1024}),
  "hybrid": Body(("gla",) * 5 + ("softmax_attention",), 8, {"gla": {"num_heads": 4}}),
  "hgrn2": Body("hgrn2", 8),
  "sse": Body("sse", 8),
  "lnssm": Body("lnssm", 8),
  "longhorn": Body("longhorn", 8),
  "rwkv6": Body("rwkv6", 16),
  "mamba3": Body("mamba3", 8),
  "mamba3_mimo": Body("mamba3", 8, {"mimo_rank": 4}),
  "mlstm": Body("mlstm", 4),
  "kda": Body("kda", 8),
  "gated_delta_net2": Body("gated_delta_net2", 8),
  "rwkv7": Body("rwkv7", 16),
  "gla_1b3": Body("gla", 4, sizes=_LARGE),
  "lnssm_1b3": Body("lnssm", 16, sizes=_LARGE),
  # 1.3B parameters, of which a token uses about 0.45B.
  "moe": Body("gla", 4, sizes={"channel_hidden": 896}, experts=_EXPERTS),
}


class Sizes(NamedTuple):
  """The common body, its batch, and what the backward pass computes again."""

  rows: int = 16
  length: int = 2048
  dim: int = 1024
  num_layers: int = 24
  channel_hidden: int = 2816
  vocab_size: int = 32_000
  loss_chunk: int | None = None
  remat: str = "none"
  matmul: str = "dtype"

  @classmethod
  def parse(cls, text: str, others: "Sizes | None" = None) -> "Sizes":
    """`rows=2,length=64,remat=full`: the `others`, by default the default sizes, but for these."""
    pairs = (part.split("=") for part in text.split(","))
    return (others or cls())._replace(
      **{name: x if isinstance(cls._field_defaults[name], str) else int(x) for name, x in pairs}
    )


def settings(body: Body, sizes: Sizes | None = None) -> Train:
  """The run of a body: its sizes, or these, AdamW with clipping, and defaults for all else."""
  sizes = Sizes(**body.sizes) if sizes is None else sizes
  options, longest = body.options, {"max_length": sizes.length}
  if body.mixer == "softmax_attention":
    options = options | longest
  elif "softmax_attention" in body.mixer:
    options = options | {"softmax_attention": longest}
  return Train(
    model=Model(
      mixer=body.mixer,
      mixer_options=options,
      num_heads=body.num_heads,
      dim=sizes.dim,
      num_layers=sizes.num_layers,
      vocab_size=sizes.vocab_size,
      channel_mixer="moe" if body.experts else "swiglu",
      channel_mixer_options=body.experts,
      channel_hidden=sizes.channel_hidden,
      norm="rms",
      embedding_norm=False,
      remat=sizes.remat,
      matmul=sizes.matmul,
    ),
    optimizer=Optimizer(
      # Slow: three steps without warm-up must not depend on how gradients are rounded. Each lowers
      # the loss by about 0.08, forty times the tolerance.
      peak_lr=1e-6,
      final_lr=1e-7,
      b1=0.9,
      b2=0.95,
      weight_decay=0.01,
      clip_norm=1.0,
    ),
    data=Data(folder="-", tokenizer="bytes", train=("random",)),
    run_dir="-",
    seq_len=sizes.length,
    global_batch=sizes.rows,
    loss_chunk=sizes.loss_chunk,
    steps=1000,
    log_every=1000,
    eval_every=1000,
    checkpoint_every=1000,
  )


def first_losses(compiled, cfg: Train, mesh, batch) -> list[float]:
  """The losses of the first three steps."""
  run = Run(compiled, init_state(cfg, mesh), batch)
  return [float(run.steps(1)["loss"]) for _ in range(3)]


def measure(
  body: Body,
  sizes: Sizes | None,
  begin: float,
  steps: int,
  runs: int,
  when_compiled: Callable[[], None] | None = None,
  documents: bool = True,
) -> dict[str, Any]:
  """The columns of one body in this process, and "budget", milliseconds by name.

  With `steps` 0 the time to the first step alone.

  Args:
    begin: `time.time()` after the imports, for the time to the first step.
    when_compiled: called when all programs are compiled, before the first one runs; None compiles
      the other policy of rematerialization after the measurement.
    documents: of about 500 tokens; else each row is one.

  Raises:
    FloatingPointError: losses are not finite, or depend on what is recomputed.
  """
  cfg = settings(body, sizes)
  mesh = device_mesh.make_mesh(cfg)
  batch = random_batch(cfg, mesh, boundaries=documents)
  compiled, _ = compile_step(cfg, mesh, batch)
  remat = "full" if cfg.model.remat == "dots" else "dots"
  other = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, remat=remat))
  compiled_other = None
  if when_compiled is not None:
    compiled_other, _ = compile_step(other, mesh, batch)
    when_compiled()
  # The first tokens of a row see few others. Where the norm of a head's output magnifies a sum that
  # nearly cancels, one of them can have most of a gradient, and all of it is rounding.
  checked = batch | {"weights": batch["weights"].at[:, : cfg.seq_len // 4].set(0)}
  if documents:  # of which there is one per row then
    checked["segment_ids"] = jnp.zeros_like(batch["segment_ids"])
  run = Run(compiled, init_state(cfg, mesh), checked)
  losses = [float(run.steps(1)["loss"])]
  columns: dict[str, Any] = {}
  if when_compiled is None:
    columns["first_step_s"] = round(time.time() - begin, 1)
  if steps == 0:
    return columns
  losses += [float(run.steps(1)["loss"]) for _ in range(2)]
  del run
  run = Run(compiled, init_state(cfg, mesh), batch)
  seconds = statistics.median(run.seconds_per_step(steps, runs))
  device = jax.local_devices()[0]
  peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
  budget = device_time(compiled.as_text(), run)
  del run, compiled

  if compiled_other is None:
    compiled_other, _ = compile_step(other, mesh, batch)
  again = first_losses(compiled_other, other, mesh, checked)
  difference = float(np.abs(np.subtract(losses, again)).max())
  if not difference <= LOSS_TOLERANCE:  # NaN is not
    raise FloatingPointError(
      f"losses {losses} and, recomputing {remat!r}, {again}: a wrong result has no time."
    )

  model = jax.eval_shape(lambda key: build_model(cfg.model, key), jax.random.key(0))
  tokens = cfg.global_batch * cfg.seq_len
  products = budget.pop("library products", 0.0)
  kernels = budget.pop("our kernels", 0.0)
  product_flops = 2 * flops.TRAINING_FACTOR * flops.kernel_entries(model) * tokens
  per_token = flops.model_flops_per_token(cfg.model, round(length_of_documents(batch)))
  mfu = flops.utilization(per_token, tokens / seconds, [device])
  return columns | {
    "documents": documents,
    "parameters": sum(x.size for x in jax.tree.leaves(model)),
    "step_ms": round(1e3 * seconds, 2),
    "tokens_per_second": round(tokens / seconds),
    "mfu": mfu and round(mfu, 4),
    "peak_gib": peak and round(peak / 2**30, 1),
    "products_ms": round(products, 2),
    "products_tflops": round(product_flops / products / 1e9) if products else None,
    "kernels_ms": round(kernels, 2),
    "rest_ms": round(sum(budget.values()), 2),
    "losses": losses,
    "loss_difference": difference,
    "budget": {name: round(ms, 3) for name, ms in budget.items()},
  }


def device_time(text: str, run: Run, steps: int = 3) -> dict[str, float]:
  """Milliseconds of a step on the device: library products, our kernels, the rest by its place."""
  paths = profiles.paths_of_instructions(text)
  found: collections.Counter[str] = collections.Counter()
  for event in profiles.traced(lambda: run.steps(steps)):
    kernel, path = event.kernel, profiles.path_of(event, paths)
    if _OWN.search(kernel):
      name = "our kernels"
    elif _PRODUCTS.search(kernel):
      name = "library products"
    else:
      part = profiles.part_of(kernel, path)
      name = f"{part}: {re.sub(r'.*[(/]', '', path).strip(')') or kernel.rstrip('0123456789_')}"
      name += " (backward)" if "transpose(" in path else ""
    found[name] += 1e3 * event.seconds / steps
  return dict(found.most_common())


def large_product_tflops(size: int = 8192) -> float:
  """The rate of one large bfloat16 product, in TFLOP/s."""
  x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
  product = jax.jit(jnp.matmul).lower(x, x).compile()
  return 2e3 * size**3 / milliseconds(product, [(x, x)], calls=10, groups=5) / 1e12


def command_of(name: str, sizes: str, args, cache: str, steps: int) -> list[str]:
  """The command of a process that measures one body at one size."""
  command = [sys.executable, "-m", "benchmarks.model_step", "--one", name, "--cache", cache]
  return [
    *command,
    *("--steps", str(steps), "--runs", str(args.runs)),
    *(["--sizes", sizes] if sizes else []),
    *([] if args.documents else ["--no-documents"]),
    *(["--ampere"] if args.ampere else []),
    *(["--xla"] if args.xla else []),
  ]


def rows_of(name: str, args) -> Iterator[dict[str, Any]]:
  """Ours, with the time to the first step measured twice, and each peer's, as they are measured."""
  for sizes in args.sizes:
    with tempfile.TemporaryDirectory() as cache:
      run = lambda steps: turns.alone(command_of(name, sizes, args, cache, steps))  # noqa: B023
      row = run(args.steps)
      row["cold_s"] = row.get("first_step_s")
      if args.warm:
        row["warm_s"] = run(0).get("first_step_s")
    yield ours(name, sizes, row, args.top)
  if args.peers:
    yield from peers(name, args.documents)


def peers(name: str, documents: bool) -> Iterator[dict[str, Any]]:
  """Rows of the peers of a body. fla's have one document per row."""
  rows = itertools.chain(model_jla.measure(name, documents=documents), model_peers.measure(name))
  return ({"body": name} | peer for peer in rows)


def ours(name: str, sizes: str, row: dict[str, Any], top: int) -> dict[str, Any]:
  """A row of ours, after its budget has been printed."""
  for place, ms in list(row.get("budget", {}).items())[:top]:
    print(f"  {ms:8.3f} ms  {place}", flush=True)
  return {"body": name, "sizes": sizes or None, "who": "lnssm_jax"} | row


def rows_together(names: Sequence[str], args) -> Iterator[dict[str, Any]]:
  """Rows of processes that compile at the same time and are measured one after the other."""
  with tempfile.TemporaryDirectory() as cache:
    command = lambda name, sizes: command_of(name, sizes, args, cache, args.steps)
    every = itertools.product(names, args.sizes)
    for group in itertools.batched(every, turns.AT_ONCE):  # the first are measured soon
      rows = turns.take([[*command(name, sizes), "--in-turn"] for name, sizes in group])
      for (name, sizes), row in zip(group, rows, strict=True):
        yield ours(name, sizes, row, args.top)
  for name in names if args.peers else ():
    yield from peers(name, args.documents)


def main(arguments=None) -> list[dict[str, Any]]:
  """Measures, printing rows as they come; returns them."""
  begin = time.time()
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", nargs="+", choices=list(BODIES), default=list(BODIES))
  parser.add_argument(
    "--sizes", nargs="+", default=[""], metavar="rows=2,length=64", help="other sizes, one or more"
  )
  parser.add_argument("--steps", type=int, default=20, help="steps in each timed run")
  parser.add_argument("--runs", type=int, default=3)
  parser.add_argument("--top", type=int, default=16, help="lines of the budget")
  parser.add_argument(
    "--warm",
    action=argparse.BooleanOptionalAction,
    default=True,
    help="also the first step with a filled compile cache",
  )
  parser.add_argument(
    "--documents", action=argparse.BooleanOptionalAction, default=True,
    help="documents of about 500 tokens; else one per row",
  )  # fmt: skip
  parser.add_argument("--ampere", action="store_true", help="what a GPU since Ampere would run")
  parser.add_argument("--xla", action="store_true", help="what a GPU without kernels would run")
  parser.add_argument("--together", action="store_true", help="compile all, then measure each")
  parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
  parser.add_argument("--out", type=Path, help="a CSV file")
  parser.add_argument("--one", choices=list(BODIES), help=argparse.SUPPRESS)
  parser.add_argument("--cache", help=argparse.SUPPRESS)
  parser.add_argument("--in-turn", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args(arguments)
  if args.ampere or args.xla:
    device.architecture_of = lambda _: device.AMPERE if args.ampere else None
  if args.one:
    jax.config.update("jax_compilation_cache_dir", args.cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    sizes = Sizes.parse(args.sizes[0]) if args.sizes[0] else None
    wait = turns.wait if args.in_turn else None
    row = measure(BODIES[args.one], sizes, begin, args.steps, args.runs, wait, args.documents)
    print(json.dumps(row), flush=True)
    return [row]
  rows = []
  one_by_one = itertools.chain.from_iterable(rows_of(name, args) for name in args.only)
  for row in rows_together(args.only, args) if args.together else one_by_one:
    rows.append({field: row.get(field) for field in FIELDS})
    print(json.dumps({k: v for k, v in rows[-1].items() if v is not None}), flush=True)
    if args.out:
      csv_rows.write(args.out, FIELDS, rows)  # at once: a later failure loses nothing
  if jax.default_backend() == "gpu":
    print(f"one product of 8192 x 8192 x 8192: {large_product_tflops():.0f} TFLOP/s")
  return rows


if __name__ == "__main__":
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  main()

"""flash-linear-attention (fla-core: PyTorch, Triton), measured in processes of its own.

    python -m benchmarks.kernel_peers compile|run FOLDER COMBINATIONS

COMBINATIONS is JSON, [[case, [B, T, H, K, V]], ...].

Triton's autotuner is slow, and most of it is compiling. So `compile` runs once for each case, all
at the same time, with a tuner that only builds; then `run` tunes what is built and times, alone on
the GPU, by `triton.testing.do_bench`. It prints a line of JSON for each combination and saves a
corner of its inputs and results, which `benchmarks.kernels` compares with the reference.
torch and fla are imported here only, and only in those processes.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

OPERATIONS = {
  "scalar-constant": "chunk_retention",
  "scalar-step": "fused_chunk_simple_gla",
  "channel-constant-normalized": "chunk_linear_attn",  # no decay: fla has no constant per channel
  "channel-step": "chunk_gla",
  "channel-step-bonus": "chunk_rwkv6",
  "no-decay": "chunk_linear_attn",
}
AT_ONE_STEP = {"channel-step": "fused_recurrent_gla"}


def operation(case: str, T: int) -> str | None:
  """The name of fla's function for a case, or None."""
  return (AT_ONE_STEP if T == 1 else OPERATIONS).get(case)


def missing() -> str | None:
  """Why there is nothing to measure, or None. Imports nothing."""
  absent = [name for name in ("torch", "triton", "fla") if not importlib.util.find_spec(name)]
  return f"{' and '.join(absent)} not installed" if absent else None


def measure(combinations, folder: Path, *, build: bool = True) -> list[dict]:
  """The rows of all combinations that fla has an operation for.

  `build=False` leaves out the phase that builds all variants: for where fla has its tuning cached.
  """
  known = [(case, tuple(shape)) for case, shape in combinations if operation(case, shape[1])]
  command = lambda phase, some: [
    sys.executable, "-m", "benchmarks.kernel_peers", phase, str(folder), json.dumps(some),
  ]  # fmt: skip
  # What the compile phase pretends to have found must not be kept.
  environment = os.environ | {"FLA_CACHE_RESULTS": "0"}
  builders = [
    subprocess.Popen(
      command("compile", [x for x in known if x[0] == case]),
      env=environment,
      stdout=subprocess.DEVNULL,
    )
    for case in dict.fromkeys(case for case, _ in known if build)
  ]
  for builder in builders:
    builder.wait()
  if not known:
    return []
  rows = []
  with subprocess.Popen(command("run", known), stdout=subprocess.PIPE, text=True) as runner:
    for line in runner.stdout:
      if line.startswith("{"):
        rows.append(json.loads(line))
        print(line.rstrip(), file=sys.stderr, flush=True)
  done = {(row["case"], tuple(row["shape"])) for row in rows}
  return rows + [
    {"case": case, "shape": shape, "op": operation(case, shape[1]), "failed": "its process ended"}
    for case, shape in known
    if (case, shape) not in done
  ]


def make_inputs(torch, case: str, shape) -> dict:
  """Tensors by the names of `kernel_cases`, drawn from the same distributions."""
  B, T, H, K, V = shape
  logsigmoid = torch.nn.functional.logsigmoid
  normal = functools.partial(torch.randn, device="cuda")
  q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V)
  if case.endswith("normalized"):
    q, k = torch.exp(q / 2), torch.exp(k / 2)
  else:
    k = k * K**-0.5
  made = {name: x.to(torch.bfloat16) for name, x in (("q", q), ("k", k), ("v", v))}
  if case == "scalar-step":
    made["log_decay"] = logsigmoid(normal(B, T, H) + 2)
  elif case.startswith("channel-step"):
    made["log_decay"] = logsigmoid(normal(B, T, H, K)) / 16
  if case.endswith("bonus"):
    made["bonus"] = normal(H, K).to(torch.bfloat16)
  if T == 1:
    made["kv"] = normal(B, H, K, V)
  return made


def call(op: str, x: dict):
  """`out` of fla's function."""
  from fla.ops.gla import chunk_gla, fused_recurrent_gla
  from fla.ops.linear_attn import chunk_linear_attn
  from fla.ops.retention import chunk_retention
  from fla.ops.rwkv6 import chunk_rwkv6
  from fla.ops.simple_gla import fused_chunk_simple_gla

  qkv, scale = (x["q"], x["k"], x["v"]), x["q"].shape[-1] ** -0.5
  if op == "chunk_retention":
    return chunk_retention(*qkv, scale=scale)[0]
  if op == "fused_chunk_simple_gla":
    return fused_chunk_simple_gla(*qkv, g=x["log_decay"], scale=scale)[0]
  if op == "chunk_linear_attn":
    return chunk_linear_attn(*qkv, scale=scale, normalize=x["normalize"])[0]
  if op == "chunk_gla":
    return chunk_gla(*qkv, x["log_decay"], scale=scale)[0]
  if op == "chunk_rwkv6":
    return chunk_rwkv6(*qkv, x["log_decay"], x["bonus"], scale=scale)[0]
  options = {"gk": x["log_decay"], "initial_state": x["kv"], "output_final_state": True}
  return fused_recurrent_gla(*qkv, scale=scale, **options)[0]


def measure_one(torch, do_bench, case: str, shape, folder: Path, *, save: bool) -> dict:
  """The row of one combination; `do_bench` returns milliseconds."""
  import numpy as np

  from benchmarks import kernel_cases as kc

  op, case_of = operation(case, shape[1]), kc.CASES[case]
  arrays = make_inputs(torch, case, shape)
  inputs = {name: x.requires_grad_(shape[1] > 1) for name, x in arrays.items()}
  run = lambda: call(op, inputs | {"normalize": case_of.normalize})
  begin = time.perf_counter()
  out = run()
  cotangent = torch.randn_like(out)
  stride = max(1, shape[4] // kc.COLUMNS)
  inside = torch.zeros_like(out)
  inside[-kc.ROWS :, ..., ::stride] = cotangent[-kc.ROWS :, ..., ::stride]
  if shape[1] > 1:
    out.backward(inside)
  torch.cuda.synchronize()
  row = {"case": case, "shape": shape, "op": op, "compile_s": time.perf_counter() - begin}

  if save:
    named = inputs | {"out": out, "cotangent": cotangent}
    named |= {f"d {n}": x.grad for n, x in inputs.items() if x.grad is not None}
    saved = {}
    for name, x in named.items():
      plain = "out" if name == "cotangent" else name.removeprefix("d ")
      saved[name] = kc.part(case_of, plain, x.detach()).float().cpu().numpy()
    if op == "chunk_retention":
      saved["log_decay"] = kc.retention_decay(shape[2])[-kc.HEADS :]
    row["corner"] = f"{case}-{'-'.join(map(str, shape))}.npz"
    np.savez(folder / row["corner"], **saved)
    del named, saved
  del out, inside

  def both():
    run().backward(cotangent)
    for x in inputs.values():
      x.grad = None

  options = {"warmup": 50, "rep": 150, "return_mode": "median"}
  with torch.no_grad():
    row["forward_ms"] = float(do_bench(run, **options))
  if shape[1] > 1:
    row["both_ms"] = float(do_bench(both, **options))
  return row


def main(phase: str, folder: str, combinations: str):
  """One of the two phases; see the top of the file."""
  warnings.filterwarnings("ignore")
  import torch
  from triton.testing import do_bench

  if phase == "compile":
    from triton.runtime.autotuner import Autotuner

    def build_only(kernel_call, *_, **__):
      kernel_call()
      torch.cuda.synchronize()
      return [1.0, 1.0, 1.0]

    Autotuner.do_bench = property(lambda self: build_only, lambda self, value: None)
    do_bench = lambda function, **_: (function(), 0.0)[1]
  for case, shape in json.loads(combinations):
    try:
      row = measure_one(torch, do_bench, case, shape, Path(folder), save=phase == "run")
    except Exception as reason:  # one operation may be unsupported on this GPU
      failed = " ".join(f"{type(reason).__name__}: {reason}".split())[:300]
      row = {"case": case, "shape": shape, "op": operation(case, shape[1]), "failed": failed}
    print(json.dumps(row), flush=True)
    torch.cuda.empty_cache()


if __name__ == "__main__":
  main(*sys.argv[1:])

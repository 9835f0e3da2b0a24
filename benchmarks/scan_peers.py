"""flash-linear-attention's forms of the other scans, measured in a process of its own.

    python -m benchmarks.scan_peers INPUTS.npz NAME

The file holds a case's arguments by name, "cotangent" of the result and "inside", the cotangent of
the part that is compared, all float32. Saves result and gradients beside them, with the time and
what ran, for `benchmarks.scan_kernels` to compare with the reference. torch and fla are imported
here only. Triton tunes its kernels first; where it has the results cached it starts at once.
"""

import importlib.util
import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np

# fla's gated delta rule refuses to run on Hopper with Triton 3.4 to 3.7: the table says so.
OPERATIONS = {
  "diagonal_scan bfloat16": "chunk_hgrn",
  "delta_rule": "chunk_delta_rule",
  "delta_rule gated": "chunk_gated_delta_rule",
}
WIDE = ("log_decay",)  # stays float32; all others are bfloat16


def missing(case: str) -> str | None:
  """Why there is nothing to measure, or None. Imports nothing."""
  if case not in OPERATIONS:
    return "fla has no such operation"
  absent = [name for name in ("torch", "triton", "fla") if not importlib.util.find_spec(name)]
  return f"{' and '.join(absent)} not installed" if absent else None


def measure(case: str, arrays: dict[str, np.ndarray], folder: Path) -> dict:
  """{"results": arrays by name, "forward_ms", "both_ms", "op"}.

  Raises:
    RuntimeError: fla could not run it; the message is fla's.
  """
  file = folder / "peer.npz"
  np.savez(file, **arrays)
  call = [sys.executable, "-m", "benchmarks.scan_peers", str(file), case]
  done = subprocess.run(call, capture_output=True, text=True, check=False)
  lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
  row = json.loads(lines[-1]) if lines else {"failed": done.stderr.strip()[-300:]}
  if "failed" in row:
    raise RuntimeError(row["failed"])
  with np.load(folder / "results.npz") as results:
    return row | {"results": dict(results)}


def call(case: str, x: dict):
  """fla's result."""
  if case.startswith("diagonal"):
    from fla.ops.hgrn import chunk_hgrn

    return chunk_hgrn(x["x"], x["decay"])[0]  # the logarithm of the decay
  arguments = x["q"], x["k"], x["v"]
  if "log_decay" in x:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(*arguments, g=x["log_decay"], beta=x["beta"], scale=1.0)[0]
  from fla.ops.delta_rule import chunk_delta_rule

  return chunk_delta_rule(*arguments, beta=x["beta"], scale=1.0)[0]


def main(file: str, case: str) -> None:
  """Runs, saves and prints one line of JSON."""
  warnings.filterwarnings("ignore")
  import torch
  from triton.testing import do_bench

  def tensor(name, x):
    x = torch.from_numpy(x).cuda()
    return x if name in WIDE else x.to(torch.bfloat16)

  try:
    with np.load(file) as arrays:
      made = {name: tensor(name, x) for name, x in arrays.items()}
    cotangent, inside = made.pop("cotangent"), made.pop("inside")
    if case.startswith("diagonal"):
      decay = made["decay"].float()
      made["decay"] = decay.log().to(torch.bfloat16)
    inputs = {name: x.requires_grad_() for name, x in made.items()}
    out = call(case, inputs)
    out.backward(inside)
    named = {"out": out} | {f"d {n}": x.grad for n, x in inputs.items()}
    if case.startswith("diagonal"):
      named["d decay"] = named["d decay"].float() / decay
    plain = {name: x.detach().float().cpu().numpy() for name, x in named.items()}
    np.savez(Path(file).with_name("results.npz"), **plain)

    def both():
      call(case, inputs).backward(cotangent)
      for x in inputs.values():
        x.grad = None

    options = {"warmup": 50, "rep": 150, "return_mode": "median"}
    with torch.no_grad():
      forward_ms = do_bench(lambda: call(case, inputs), **options)
    row = {"op": OPERATIONS[case], "forward_ms": forward_ms, "both_ms": do_bench(both, **options)}
  except Exception as reason:  # the operation may be unsupported on this GPU
    row = {"failed": " ".join(f"{type(reason).__name__}: {reason}".split())[:300]}
  print(json.dumps(row), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])

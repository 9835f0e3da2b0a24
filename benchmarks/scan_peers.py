"""Other libraries' forms of the scans, measured in a process of its own.

    python -m benchmarks.scan_peers INPUTS.npz NAME

flash-linear-attention (fla), and for the selective scan the CUDA kernels of mamba-ssm. The file
holds a case's arguments by name, "cotangent" of the result and "inside", the cotangent of the part
that is compared; bfloat16 as its bits in uint16. Saves result and gradients there in the same way,
 with the time and what ran, for `benchmarks.scan_kernels` to compare with the reference. torch,
fla and mamba-ssm are imported here only. Triton tunes its kernels first; where it has the results
cached it starts at once.
"""

import functools
import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from benchmarks import turns


class Peer(NamedTuple):
  """A library and its function for a case."""

  library: str
  op: str
  modules: tuple[str, ...] = ("torch", "triton", "fla")
  channel_major: bool = False  # wants [B, D, T] for [B, T, D], steps next to each other in memory
  without: tuple[str, ...] = ()  # arguments that it does not have: it computes another function


# fla's gated delta rule rejects to run on Hopper with Triton 3.4 to 3.7: the table says so.
PEERS = {
  "scalar-constant": Peer("fla", "chunk_retention"),
  "scalar-step": Peer("fla", "fused_chunk_simple_gla"),
  "channel-constant-normalized": Peer("fla", "chunk_linear_attn", without=("log_decay",)),
  "channel-step": Peer("fla", "chunk_gla"),
  "channel-step-bonus": Peer("fla", "chunk_rwkv6"),
  "no-decay": Peer("fla", "chunk_linear_attn"),
  "diagonal_scan bfloat16": Peer("fla", "chunk_hgrn"),
  "selective_scan": Peer(
    "mamba-ssm", "selective_scan_fn", ("torch", "triton", "mamba_ssm", "selective_scan_cuda"), True
  ),
  "delta_rule": Peer("fla", "chunk_delta_rule"),
  "delta_rule gated": Peer("fla", "chunk_gated_delta_rule"),
}
WIDE = ("log_decay", "a", "skip")  # stay float32; all others are bfloat16


def missing(case: str) -> str | None:
  """Why the peer of a case cannot run, or None. Imports nothing."""
  absent = [name for name in PEERS[case].modules if not importlib.util.find_spec(name)]
  return f"{' and '.join(absent)} not installed" if absent else None


def bits(x: np.ndarray) -> np.ndarray:
  """bfloat16 as uint16, which a file can hold; others as they are."""
  return x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x


def from_bits(x: np.ndarray) -> np.ndarray:
  """The inverse of `bits`."""
  return x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x


def measure(case: str, arrays: dict[str, np.ndarray], folder: Path) -> dict:
  """{"results": arrays by name, "forward_ms", "both_ms"}.

  Raises:
    RuntimeError: the library could not run it; the message is the library's.
  """
  file = folder / "peer.npz"
  np.savez(file, **{name: bits(x) for name, x in arrays.items()})
  call = [sys.executable, "-m", "benchmarks.scan_peers", str(file), case]
  row = turns.alone(call)
  if failed := row.get("failed") or row.get("note"):
    raise RuntimeError(failed)
  with np.load(folder / "results.npz") as results:
    return row | {"results": {name: from_bits(x) for name, x in results.items()}}


def call(case: str, x: dict):
  """The library's result."""
  if case == "selective_scan":
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return selective_scan_fn(x["x"], x["dt"], x["a"], x["b"], x["c"], x["skip"])
  if case.startswith("diagonal"):
    from fla.ops.hgrn import chunk_hgrn

    return chunk_hgrn(x["x"], x["decay"])[0]  # the logarithm of the decay
  arguments = x["q"], x["k"], x["v"]
  if "beta" not in x:
    from fla.ops.gla import chunk_gla
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.retention import chunk_retention
    from fla.ops.rwkv6 import chunk_rwkv6
    from fla.ops.simple_gla import fused_chunk_simple_gla

    op, decay = PEERS[case].op, x.get("log_decay")
    run = {
      "chunk_retention": chunk_retention,
      "fused_chunk_simple_gla": functools.partial(fused_chunk_simple_gla, g=decay),
      "chunk_linear_attn": functools.partial(chunk_linear_attn, normalize="normal" in case),
      "chunk_gla": chunk_gla,
      "chunk_rwkv6": chunk_rwkv6,
    }[op]
    more = {"chunk_gla": (decay,), "chunk_rwkv6": (decay, x.get("bonus"))}.get(op, ())
    return run(*arguments, *more, scale=x["q"].shape[-1] ** -0.5)[0]
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

  def turned(x):
    return x.mT.contiguous() if PEERS[case].channel_major and x.ndim == 3 else x

  def tensor(name, x):
    x = torch.from_numpy(x)
    x = turned((x.view(torch.bfloat16) if x.dtype == torch.uint16 else x).cuda())
    return x if name in WIDE else x.to(torch.bfloat16)

  def array(x):
    x = turned(x.detach()).cpu()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()

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
    named = {"out": out} | {f"d {n}": x.grad for n, x in inputs.items() if x.grad is not None}
    if case.startswith("diagonal"):
      named["d decay"] = named["d decay"].float() / decay
    np.savez(Path(file).with_name("results.npz"), **{name: array(x) for name, x in named.items()})
    for x in inputs.values():
      x.grad = None  # a gradient that is there would be added to

    def both():
      call(case, inputs).backward(cotangent)
      for x in inputs.values():
        x.grad = None

    options = {"warmup": 50, "rep": 150, "return_mode": "median"}
    with torch.no_grad():
      forward_ms = do_bench(lambda: call(case, inputs), **options)
    row = {"forward_ms": forward_ms, "both_ms": do_bench(both, **options)}
  except Exception as reason:  # the operation may be unsupported on this GPU
    row = {"failed": " ".join(f"{type(reason).__name__}: {reason}".split())[:300]}
  print(json.dumps(row), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])

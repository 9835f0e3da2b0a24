"""The passes over memory of a training step, and their bytes, as XLA compiles it. No GPU is needed.

    python -m benchmarks.passes gla
    python -m benchmarks.passes mamba3 --gpu A100 --sizes rows=8,length=2048

A body of `benchmarks.model_step`, of one layer unless `--sizes` says otherwise, is compiled for a
described GPU (`benchmarks.described`), which takes a minute. A pass is an instruction of the
compiled program: one of our kernels, a library's product, or what XLA fused. It is printed with
the megabytes of its arguments and of its results, each counted once; a kernel that reads an array
twice, or a part of it, moves other bytes. Passes within loops count as often as the loop runs.

The last lines have the sum of each kind, the milliseconds that they take at least at the memory's
rate, and the temporary memory.
"""

import argparse
import collections
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import described
from benchmarks.model_step import BODIES, Sizes, settings
from pallas_kernels.core import device
from train.cluster import device_mesh
from train.logging import profiles
from train.step.model import model_graph
from train.step.optimizer import make_optimizer
from train.step.state import abstract_state
from train.step.train_step import make_train_step

_NO_PASS = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"}
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")


class Pass(NamedTuple):
  """An instruction that reads and writes memory."""

  kind: str  # "kernels", "products" or "rest"
  name: str
  path: str  # the place in the model
  read: int  # bytes, of all of its executions
  written: int


def passes(text: str) -> list[Pass]:
  """The passes of a compiled program, in the order of its text."""
  computations = dict(_computations(text))
  entry = next(lines for name, lines in computations.items() if name.startswith("ENTRY "))
  return list(_passes(entry, computations, 1))


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
  for block in re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\{\n)", text):
    first, *lines = block.splitlines()
    entry, name = re.match(r"(ENTRY )?%?([\w.\-]*)", first).groups()
    yield (entry or "") + name, lines


def _passes(lines, computations, times: int) -> Iterator[Pass]:
  sizes: dict[str, int] = {}
  for line in lines:
    if not (match := _INSTRUCTION.match(line)):
      continue
    name, shape, operation, rest = match.groups()
    sizes[name] = num_bytes(shape)
    if operation in _NO_PASS:
      continue
    if operation == "while":
      body = re.search(r"body=%?([\w.\-]+)", rest)[1]
      trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
      yield from _passes(computations[body], computations, times * int(trips[1] if trips else 1))
      continue
    if '"__custom_fusion"' in rest:  # a kernel and the slices of arrays that it reads and writes
      called = computations[re.search(r"calls=%?([\w.\-]+)", rest)[1]]
      yield from (each for each in _passes(called, {}, times) if each.kind != "rest")
      continue
    path = re.search(r'op_name="([^"]*)"', rest)
    arguments = set(re.findall(r"%([\w.\-]+)", rest.split("), ")[0]))
    yield Pass(
      _kind(operation, rest),
      name,
      path[1] if path else "",
      times * sum(sizes.get(argument, 0) for argument in arguments),
      times * sizes[name],
    )


def _kind(operation: str, rest: str) -> str:
  target = re.search(r'custom_call_target="([^"]*)"', rest)
  if target and "mosaic_gpu" in target[1]:
    return "kernels"
  products = operation == "dot" or "__triton_gemm" in rest or "__triton_nested_gemm" in rest
  return "products" if products or (target and "cublas" in target[1]) else "rest"


def num_bytes(shape: str) -> int:
  """Of an array or a tuple as XLA prints its type: `(bf16[2,3]{1,0}, pred[])`."""
  total = 0
  for dtype, dims in re.findall(r"\b([a-z]+\d*(?:e\d\w*)?)\[([\d,]*)\]", shape):
    size = 1 if dtype in ("pred", "token") else jnp.dtype(_NAMES.get(dtype, dtype)).itemsize
    for dim in filter(None, dims.split(",")):
      size *= int(dim)
    total += size
  return total


_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"} | {
  f"{short}{bits}": f"{long}{bits}"
  for short, long in (("s", "int"), ("u", "uint"))
  for bits in (8, 16, 32, 64)
}
_NAMES |= {"f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}


def compiled(name: str, sizes: Sizes, gpu: described.Gpu, architecture: str | None = None):
  """The training step of a body of `benchmarks.model_step` with documents, compiled for a GPU."""
  cfg = settings(BODIES[name], sizes)
  with described.default(gpu, architecture):
    mesh = device_mesh.make_mesh(cfg)
    sharding = device_mesh.batch_sharding(mesh)
    shape = cfg.global_batch, cfg.seq_len
    array = lambda dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    batch = {x: array(jnp.int32) for x in ("tokens", "targets", "segment_ids")}
    batch["weights"] = array(jnp.float32)
    transform = make_optimizer(cfg.optimizer, cfg.steps)[0]
    step = make_train_step(cfg, model_graph(cfg.model), transform, mesh, None)
    traced = step.trace(abstract_state(cfg, mesh), batch)
    return traced.lower(lowering_platforms=("cuda",)).compile()


def main():
  """Prints the passes of one body, largest first."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("body", choices=list(BODIES))
  parser.add_argument("--gpu", choices=list(described.GPUS), default="H100")
  parser.add_argument("--sizes", default="", help="as in benchmarks.model_step, also num_layers=2")
  parser.add_argument(
    "--ampere", action="store_true", help="the kernels for every GPU since Ampere"
  )
  parser.add_argument("--least", type=float, default=30.0, help="MB of the passes that are printed")
  args = parser.parse_args()
  if missing := described.missing():
    parser.error(f"XLA's compiler for GPUs is not installed: {missing}")
  body, gpu = BODIES[args.body], described.GPUS[args.gpu]
  sizes = Sizes(**{**body.sizes, "num_layers": 1})
  sizes = Sizes.parse(args.sizes, sizes) if args.sizes else sizes
  program = compiled(args.body, sizes, gpu, device.AMPERE if args.ampere else None)
  sums: collections.Counter[str] = collections.Counter()
  for each in sorted(passes(program.as_text()), key=lambda x: -(x.read + x.written)):
    moved = each.read + each.written
    sums[each.kind] += moved
    if moved >= args.least * 1e6:
      part = profiles.part_of(each.name, each.path)
      where = f"{part}: {'/'.join(each.path.split('/')[-2:])}"
      print(f"{moved / 1e6:9.0f} MB  {each.read / 1e6:7.0f} + {each.written / 1e6:7.0f}  "
            f"{each.kind:9} {where}")  # fmt: skip
  for kind, moved in sums.most_common():
    print(f"{kind:9} {moved / 1e9:8.2f} GB  {moved / gpu.bandwidth / 1e6:7.2f} ms at least")
  memory = program.memory_analysis()
  print(f"temporary {memory.temp_size_in_bytes / 2**30:8.2f} GiB")


if __name__ == "__main__":
  main()

"""Speed of single steps on a GPU, as generation makes them: kernels next to XLA's forms.

    python -m benchmarks.decode --out docs/decode.csv
    python -m benchmarks.decode --only delta_rule --batches 64 --no-models
    python -m benchmarks.decode --only "attention grouped long" --batches 64 --layers 1 --no-models

A program makes many steps in a loop on the device, each of them for a stack of layers whose states
the loop carries and the program was given to keep: launches are paid as in generation, states are
updated in place, and those of all layers do not fit in the cache together. The arguments of a step
are fresh to the compiler, so that nothing is computed once for all steps.

A time is printed only next to an error within the limit: after the last step, output and state of
the last row are compared with the same steps in float64. The floor reads and writes the state once
(of attention, reads it) at the speed of a large copy; where the states fit in the cache a step can
be faster.

Then whole models generate, with single steps in kernels and without (`benchmarks.generation`).
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import csv_rows, generation, scan_kernels
from benchmarks.scan_kernels import LIMITS
from benchmarks.timing import copy_bandwidth
from lnssm_jax import ops
from lnssm_jax.models import LanguageModel

BATCHES = (1, 8, 64, 512)
FIELDS = (
  "scan", "batch", "who", "us", "floor_us", "floor_share", "error_out", "error_state", "compile_s",
  "note",
)  # fmt: skip

WHO = ("pallas", "chunked", "reference")
Sizes = Mapping[str, int]
Normal = Callable[..., jax.Array]  # of a shape: normal numbers


class Case(NamedTuple):
  """A scan at sizes that models have, for T = 1, with a state."""

  scan: scan_kernels.Case  # called with arrays by name, `initial_state` and `implementation`
  state: Callable[[Normal, Sizes], Any]
  sizes: Sizes
  who: tuple[str, ...] = WHO
  rewritten: bool = True  # the whole state, by each step


def _case(name: str, state: type, axes: dict[str, str], who=WHO, **sizes: int) -> Case:
  """A case of `benchmarks.scan_kernels` with a normal state of these axes; a sum is positive."""

  def draw(normal, n):
    fields = {field: normal(*(n[axis] for axis in of)) for field, of in axes.items()}
    return state(**{field: jnp.exp(x) if "sum" in field else x for field, x in fields.items()})

  scan = scan_kernels.CASES[name]
  return Case(scan, draw, scan.sizes | sizes, who)


def _wkv4_state(normal, n):
  zeros = jnp.zeros((n["B"], n["D"]))
  return ops.WKV4State(zeros, normal(n["B"], n["D"]), jnp.exp(normal(n["B"], n["D"])))


def _attention(window: int, **sizes: int) -> Case:
  """A full cache for a window of so many tokens."""

  def draw(normal, n):
    axes = {"q": "HK", "k": "GK", "v": "GV"}
    arrays = {x: normal(n["B"], 1, *(n[axis] for axis in axes[x])) for x in axes}
    return {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}

  def cache(normal, n):
    keys, values = (normal(n["B"], window - 1, n["G"], n[x]).astype(jnp.bfloat16) for x in "KV")
    return ops.AttentionState(keys, values, jnp.full(n["B"], 2 * window, jnp.int32))

  call = functools.partial(ops.attention, window=window)
  sizes = {"K": 128, "V": 128} | sizes
  scan = scan_kernels.Case(call, {"q": "BTHK", "k": "BTGK", "v": "BTGV"}, draw, sizes)
  return Case(scan, cache, sizes, ("pallas", "chunked"), rewritten=False)


_MEMORY = ops.LinearAttentionState, {"kv": "BHKV"}
CASES = {
  "lnssm": _case("channel-constant-normalized", _MEMORY[0], {"kv": "BHKV", "key_sum": "BHK"}, H=4),
  "gla": _case("channel-step", *_MEMORY, H=4),
  "retnet": _case("scalar-constant", *_MEMORY, H=4),
  "attention": _attention(1024, H=16, G=16),
  "attention grouped": _attention(2048, H=32, G=8),
  "attention grouped long": _attention(32768, H=32, G=8),
  "delta_rule": _case("delta_rule gated", ops.DeltaRuleState, {"kv": "BHKV"}, H=16),
  "selective_scan": _case("selective_scan", ops.SelectiveState, {"h": "BDN"}),
  "longhorn_scan": _case("longhorn_scan", ops.LonghornState, {"h": "BDN"}),
  "diagonal_scan": _case(
    "diagonal_scan", ops.DiagonalState, {"h": "BD"}, ("chunked", "reference"), D=4096
  ),
  "wkv4": Case(scan_kernels.CASES["wkv4"], _wkv4_state, {"D": 4096}),
}


def make_inputs(case: Case, batch: int, layers: int):
  """(arrays by name, a state) for each layer."""
  sizes = {**case.sizes, "B": batch, "T": 1}
  keys = iter(jax.random.split(jax.random.key(0), 16 * layers))
  normal = lambda *shape: jax.random.normal(next(keys), shape)
  return [(case.scan.draw(normal, sizes), case.state(normal, sizes)) for _ in range(layers)]


def chain(case: Case, who: str, steps: int):
  """A function of (states, outputs to be overwritten, arrays): both after `steps`, and `steps`."""
  step = jax.jit(lambda x, state: case.scan.call(**x, initial_state=state, implementation=who))

  def run(states, outs, arrays):
    def body(_, carry):
      states, _, number = carry
      # Fresh arguments: what a step computes of them alone may not move out of the loop.
      given, number = jax.lax.optimization_barrier((arrays, number))
      results = [step(x, state) for x, state in zip(given, states, strict=True)]
      return [state for _, state in results], [out for out, _ in results], number + 1

    return jax.lax.fori_loop(0, steps, body, (states, outs, 0))

  return run


def reference(case: Case, arrays, state, steps: int):
  """(output, state) of the last row after `steps` steps with the same arguments, in float64."""
  cpu = jax.local_devices(backend="cpu")[0]
  with jax.enable_x64(True), jax.default_device(cpu):
    wide = lambda x: np.asarray(x).astype(np.float64)
    row = lambda x, axes: x[-1:] if axes.startswith("B") else x
    long = lambda x, axes: np.repeat(x, steps, axis=1) if "T" in axes else x
    small = {n: long(row(wide(x), case.scan.axes[n]), case.scan.axes[n]) for n, x in arrays.items()}
    exact = lambda x: wide(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)
    state = jax.tree.map(lambda x: exact(x)[-1:], state)
    run = lambda x, s: case.scan.call(**x, initial_state=s, implementation="reference")
    out, state = jax.jit(run)(jax.tree.map(jnp.asarray, small), jax.tree.map(jnp.asarray, state))
    return np.asarray(out)[:, -1:], jax.tree.map(np.asarray, state)


def error(got, want) -> float:
  """The largest relative error of the last rows of the arrays; infinite if any is not finite."""
  found = []
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    last = np.asarray(x[-1:]).astype(np.float64)
    finite = bool(jnp.isfinite(x).all())
    found.append(np.linalg.norm(last - y) / np.linalg.norm(y) if finite else np.inf)
  return float(max(found))


def outputs(case: Case, inputs):
  """Outputs of a step of each layer, as shapes."""
  call = functools.partial(case.scan.call, implementation="reference")
  return [jax.eval_shape(call, **arrays)[0] for arrays, _ in inputs]


class Program(NamedTuple):
  """A compiled `chain`."""

  run: Any
  seconds: float  # that it took to compile
  temporaries: int  # bytes


def compiled(case: Case, who: str, batch: int, steps: int, layers: int) -> Program:
  """`chain` for a donated state, without any array at hand."""
  begin = time.perf_counter()
  inputs = jax.eval_shape(lambda: make_inputs(case, batch, layers))
  arrays, states = [x for x, _ in inputs], [state for _, state in inputs]
  jitted = jax.jit(chain(case, who, steps), donate_argnums=(0, 1))
  run = jitted.lower(states, outputs(case, inputs), arrays).compile()
  memory = run.memory_analysis()
  return Program(run, time.perf_counter() - begin, memory.temp_size_in_bytes if memory else 0)


def measure(case: Case, run, inputs, steps: int, groups: int, want) -> dict:
  """Columns of one program; `want` is the reference of the last layer."""
  arrays = [x for x, _ in inputs]
  states = jax.tree.map(jnp.copy, [state for _, state in inputs])
  outs = [jnp.zeros(out.shape, out.dtype) for out in outputs(case, inputs)]
  states, outs, _ = run(states, outs, arrays)
  of_out, of_state = error(outs[-1], want[0]), error(states[-1], want[1])
  columns = {"error_out": f"{of_out:.1e}", "error_state": f"{of_state:.1e}", "us": "WRONG"}
  if not max(of_out, of_state) <= LIMITS[any(x.dtype == jnp.bfloat16 for x in arrays[0].values())]:
    return columns
  times = []
  for _ in range(groups):
    begin = time.perf_counter()
    states, outs, _ = run(states, outs, arrays)
    jax.block_until_ready((states, outs))
    times.append((time.perf_counter() - begin) / (steps * len(inputs)))
  return columns | {"us": 1e6 * statistics.median(times)}


def rows_of(
  name: str, batch: int, bandwidth: float, programs, steps: int, groups: int, layers: int
):
  """Yields the rows of one scan and batch; `programs`: futures of `compiled`, by who it is."""
  case = CASES[name]
  inputs = jax.jit(lambda: make_inputs(case, batch, layers))()
  state_bytes = sum(x.nbytes for x in jax.tree.leaves(inputs[0][1]))
  floor = (2e6 if case.rewritten else 1e6) * state_bytes / bandwidth
  want = reference(case, *inputs[-1], steps)
  for who, future in programs.items():
    row: dict[str, Any] = {"scan": name, "batch": str(batch), "who": who}
    row["floor_us"] = f"{floor:.2f}"
    try:
      program = future.result()
      row["compile_s"] = f"{program.seconds:.1f}"
      if program.temporaries >= state_bytes:
        row["note"] = f"temporaries: {program.temporaries / state_bytes:.1f} states"
      row |= measure(case, program.run, inputs, steps, groups, want)
    except NotImplementedError as reason:
      row["note"] = str(reason)
    except Exception as reason:  # out of memory, a compiler's error: the other rows go on
      row["note"] = f"{type(reason).__name__}: {reason}"
    if isinstance(row.get("us"), float):
      row["floor_share"] = f"{floor / row['us']:.2f}"
      row["us"] = f"{row['us']:.2f}"
    row["note"] = " ".join(row.get("note", "").split())[:300]
    yield {field: row.get(field, "") for field in FIELDS}


def models(batches, tokens: int, *, layers: int, dim: int, vocab: int):
  """Yields results of `generation.measure`, with single steps in kernels and in XLA's form."""
  model = LanguageModel(
    vocab_size=vocab, dim=dim, num_layers=layers, num_heads=4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
  )
  for batch in batches:
    for kernels in (True, False):
      with generation.single_steps(kernels=kernels):
        for result in generation.measure(model, batch, 16, [tokens]):
          yield {"steps": "kernels" if kernels else "XLA"} | result


def main(arguments=None):
  """Measures, printing rows as they come; returns them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
  parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
  parser.add_argument("--layers", type=int, default=6, help="whose states take turns")
  parser.add_argument("--steps", type=int, default=64, help="of each layer in a program")
  parser.add_argument("--groups", type=int, default=5, help="times that a program is timed")
  parser.add_argument("--copy-mib", type=int, default=2048, help="size of the copy of the floor")
  parser.add_argument("--models", action=argparse.BooleanOptionalAction, default=True,
                      help="generate with whole models too")  # fmt: skip
  parser.add_argument("--model-batches", nargs="+", type=int, default=[1, 64, 512])
  parser.add_argument("--model-dim", type=int, default=512)
  parser.add_argument("--model-vocab", type=int, default=50_277)
  parser.add_argument("--tokens", type=int, default=256, help="that each model generates")
  parser.add_argument("--out", type=Path, help="a CSV file")
  args = parser.parse_args(arguments)
  options = {"steps": args.steps, "layers": args.layers}
  bandwidth = copy_bandwidth(args.copy_mib, calls=20, groups=5)
  print(f"device: {jax.devices()[0].device_kind}, jax {jax.__version__}")
  print(f"copy: {bandwidth / 1e12:.3f} TB/s", "  ".join(FIELDS), sep="\n", flush=True)
  runs = [(name, batch) for name in args.only for batch in args.batches]
  with ThreadPoolExecutor(8) as pool:  # all before the first is timed: it keeps the host busy
    programs = {
      (name, batch): {
        who: pool.submit(compiled, CASES[name], who, batch, **options) for who in CASES[name].who
      }
      for name, batch in runs
    }
  rows = []
  for run in runs:
    for row in rows_of(*run, bandwidth, programs.pop(run), groups=args.groups, **options):
      csv_rows.add(rows, row, FIELDS, args.out)
  if args.models:
    sizes = {"layers": args.layers, "dim": args.model_dim, "vocab": args.model_vocab}
    for result in models(args.model_batches, args.tokens, **sizes):
      print(json.dumps(result), flush=True)
  return rows


if __name__ == "__main__":
  main()

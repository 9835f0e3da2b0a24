"""Sparse state expansion against the number of partitions and of tokens: mask, varlen, a loop, GLA.

    python -m benchmarks.sparse_state --out docs/sparse_state.csv           # everything: long
    python -m benchmarks.sparse_state --only varlen gla --partitions 4 64 --tokens 8192 65536 262144
    python -m benchmarks.sparse_state --only mask varlen --tokens 256 512 1024 2048 4096 --keep

The setting of the SSE paper: one row of packed tokens, two documents of half its length, 8 heads of
128 x 128, k = 1 of N partitions and one that is always on. All forms compute the always-on
partition too; "gla" is linear attention on the same k + 1 streams of T tokens, without a selection.
"loop" is one linear attention per partition, in which the tokens of the others do nothing, one
after the other. Each form is first compared at 256 tokens with the recurrence, token by token in
float32 (output and all gradients); one that is wrong is not timed. Memory is what the compiler
reserves: arguments, results and everything between. A row is a process; they compile together and
are timed alone (`benchmarks.turns`).

The last lines are for the rule of `method=None`: where varlen takes less time than mask.
"""

import argparse
import functools
import itertools
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import csv_rows, turns
from benchmarks.timing import allocated, milliseconds
from lnssm_jax import ops
from lnssm_jax.ops.core import accuracy

FORMS = ("gla", "varlen", "mask", "loop")
PARTITIONS = (4, 8, 16, 32, 64)
TOKENS = tuple(2**n for n in range(13, 19))  # 8k to 256k
CHECKED = 256  # tokens of the comparison
LIMIT = {"bfloat16": 2e-2, "float32": 2e-5}
FIELDS = ("form", "N", "tokens", "forward_ms", "backward_ms", "gib", "error", "note")


def inputs(T: int, N: int, *, heads: int, width: int, selected: int, dtype) -> dict:
  """Arrays of one row of T tokens in two documents."""
  keys = iter(jax.random.split(jax.random.key(0), 16))
  normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)
  shape = (1, T, heads, width)
  x = {name: normal(*shape) for name in ("q", "v", "q_sparse")}
  soft = lambda z: jax.nn.softmax(z.astype(jnp.float32)).astype(dtype)
  x |= {name: soft(normal(*shape)) for name in ("k", "k_sparse")}
  decay = lambda: jax.nn.log_sigmoid(normal(*shape).astype(jnp.float32) + 1) / 16
  x |= {"decay": decay(), "decay_sparse": decay()}
  eta = jax.nn.softmax(normal(1, T, N).astype(jnp.float32))
  x["gates"], indices = jax.lax.top_k(eta, selected)
  segments = (jnp.arange(T) >= T // 2).astype(jnp.int32)[None]
  return x | {"indices": indices.astype(jnp.int32), "segments": segments}


def arrays(T: int, N: int, sizes):
  """The program that makes `inputs` on the device."""
  return jax.jit(functools.partial(inputs, T, N, **dict(sizes)))


def always_on(x, method=None):
  """The partition of all tokens. With the method "gather", the oracle's."""
  form = "reference" if method == "gather" else None
  rest = {"log_decay": x["decay"], "segment_ids": x["segments"], "implementation": form}
  return ops.linear_attention(x["q"], x["k"], x["v"], **rest)[0]


def by_method(x, N, method):
  """Always-on and sparse partitions, by a method of `sparse_state_attention`."""
  sparse, _ = ops.sparse_state_attention(
    x["q_sparse"],
    x["k_sparse"],
    x["v"],
    x["indices"],
    x["gates"],
    num_partitions=N,
    log_decay=x["decay_sparse"],
    segment_ids=x["segments"],
    method=method,
    implementation="reference" if method == "gather" else None,
  )
  return always_on(x, method) + sparse


def by_loop(x, N):
  """A linear attention for each partition, one after the other."""

  @jax.checkpoint
  def add(out, partition):
    hit = x["indices"] == partition
    gate = jnp.sum(jnp.where(hit, x["gates"], 0.0), axis=-1)[..., None, None]
    used = jnp.any(hit, axis=-1)[..., None, None]
    gated = lambda name: (gate * x[name].astype(jnp.float32)).astype(x[name].dtype)
    decay = jnp.where(used, x["decay_sparse"], 0.0)
    more, _ = ops.linear_attention(
      gated("q_sparse"), gated("k_sparse"), x["v"], log_decay=decay, segment_ids=x["segments"]
    )
    return out + more.astype(jnp.float32), None

  out, _ = jax.lax.scan(add, always_on(x).astype(jnp.float32), jnp.arange(N))
  return out.astype(x["v"].dtype)


def by_gla(x, streams):
  """Linear attention of all tokens, and of as many streams more, one after the other."""
  out = always_on(x)
  rest = {"log_decay": x["decay_sparse"], "segment_ids": x["segments"]}
  for stream in range(1, streams):  # values differ, so that no stream is taken for another
    out += ops.linear_attention(x["q_sparse"], x["k_sparse"], stream * x["v"], **rest)[0]
  return out


def function(form: str, N: int, selected: int):
  """x -> output [1, T, H, V]."""
  if form == "gla":
    return lambda x: by_gla(x, selected + 1)
  return (lambda x: by_loop(x, N)) if form == "loop" else lambda x: by_method(x, N, form)


def with_backward(run):
  """x -> (output, gradients of a sum of sines of it with respect to all floating-point arrays)."""

  def both(x):
    whole = {n: a for n, a in x.items() if not jnp.issubdtype(a.dtype, jnp.floating)}
    real = {n: a for n, a in x.items() if n not in whole}
    out, pull = jax.vjp(lambda real: run(real | whole), real)
    return out, pull(jnp.cos(out))[0]

  return both


def expected(N: int, sizes, tokens: int):
  """Output and gradients of the recurrence, in float32."""
  x = arrays(tokens, N, sizes)()
  x = {n: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for n, a in x.items()}
  return jax.device_get(jax.jit(with_backward(lambda x: by_method(x, N, "gather")))(x))


def error_of(form: str, N: int, sizes) -> float | None:
  """Of output and gradients at `CHECKED` tokens; None for GLA, which is another function."""
  if form == "gla":
    return None
  run = jax.jit(with_backward(function(form, N, dict(sizes)["selected"])))
  got, want = run(arrays(CHECKED, N, sizes)()), expected(N, sizes, CHECKED)
  return float(np.max(list(accuracy.named_errors(got, want).values())))  # NaN if any is


def compiled(form: str, N: int, T: int, sizes):
  """The program that makes the arrays of one row, and by name those that are timed."""
  make = arrays(T, N, sizes)
  run = function(form, N, dict(sizes)["selected"])
  programs = {"forward": run, "backward": with_backward(run)}
  x = jax.eval_shape(make)
  programs = {name: jax.jit(program).lower(x).compile() for name, program in programs.items()}
  return make.lower().compile(), programs


def measure(form: str, N: int, T: int, sizes, args) -> dict:
  """One row."""
  row = {"form": form, "N": N, "tokens": T}
  try:
    if (error := error_of(form, N, sizes)) is not None:
      row["error"] = f"{error:.1e}"
      if not error < LIMIT[args.dtype]:
        return row | {"note": f"wrong: the limit is {LIMIT[args.dtype]}"}
    make, programs = compiled(form, N, T, sizes)
    if args.one:
      turns.wait()
    x = make()
    for name, program in programs.items():
      row["gib"] = f"{allocated(program) / 2**30:.3f}"
      row[f"{name}_ms"] = f"{milliseconds(program, [(x,)], args.calls, args.runs):.3f}"
  except Exception as reason:  # out of memory: the other rows go on
    row["note"] = " ".join(f"{type(reason).__name__}: {reason}".split())[:200]
  return row


def summary(rows: list[dict]) -> str:
  """The ratios that the aims are about, and where a method is faster."""
  times = {(r["form"], int(r["N"]), int(r["tokens"])): r for r in rows if r.get("backward_ms")}
  lines = []
  lengths = sorted({T for form, _, T in times if form == "varlen"})
  for T in lengths:
    counts = sorted(N for form, N, length in times if (form, length) == ("varlen", T))
    for column in ("forward_ms", "backward_ms"):
      ms = {N: float(times["varlen", N, T][column]) for N in counts}
      few, many = counts[0], counts[-1]
      line = f"T={T} {column}: varlen N={many} / N={few} = {ms[many] / ms[few]:.2f}"
      gla = next(
        (r for (form, _, length), r in times.items() if (form, length) == ("gla", T)), None
      )
      if gla:
        line += f"; varlen N={many} / gla = {ms[many] / float(gla[column]):.2f}"
      lines.append(line)
  for N in sorted({N for form, N, _ in times if form == "mask"}):
    both = [T for T in lengths if ("mask", N, T) in times and ("varlen", N, T) in times]
    faster = [
      T for T in both
      if float(times["varlen", N, T]["backward_ms"]) < float(times["mask", N, T]["backward_ms"])
    ]  # fmt: skip
    lines.append(f"N={N}: varlen is faster with backward at T = {faster or 'none'} of {both}")
  return "\n".join(lines)


def command(form: str, N: int, T: int, args) -> list[str]:
  """The process that measures one row."""
  one = {"only": form, "partitions": N or args.partitions[0], "tokens": T}
  names = ("heads", "width", "selected", "dtype", "calls", "runs")
  given = one | {name: getattr(args, name) for name in names}
  words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
  return [sys.executable, "-m", "benchmarks.sparse_state", "--one", *words]


def main(arguments=None) -> list[dict]:
  """Measures, printing rows as they come; returns them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", nargs="+", choices=FORMS, default=FORMS, metavar="FORM")
  parser.add_argument("--partitions", nargs="+", type=int, default=PARTITIONS, metavar="N")
  parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, metavar="T")
  parser.add_argument("--heads", type=int, default=8)
  parser.add_argument("--width", type=int, default=128, help="K and V")
  parser.add_argument("--selected", type=int, default=1, help="k")
  parser.add_argument("--dtype", choices=LIMIT, default="bfloat16")
  parser.add_argument("--most-rows", type=int, default=2**20, help="N T, of mask and loop")
  parser.add_argument("--calls", type=int, default=10, help="calls in each timed run")
  parser.add_argument("--runs", type=int, default=5)
  parser.add_argument("--out", type=Path, help="a CSV file")
  parser.add_argument("--keep", action="store_true", help="measure only what --out lacks")
  parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args(arguments)
  sizes = {"heads": args.heads, "width": args.width, "selected": args.selected}
  sizes = tuple((sizes | {"dtype": args.dtype}).items())
  wanted = dict.fromkeys(
    (form, 0 if form == "gla" else N, T)
    for T, form, N in itertools.product(args.tokens, args.only, args.partitions)
  )
  if args.one:
    ((form, N, T),) = wanted
    row = measure(form, N or args.partitions[0], T, sizes, args)
    print(json.dumps(row), flush=True)
    return [row]
  rows = csv_rows.read(args.out, without=[""], column="form") if args.keep and args.out else []
  known = {(row["form"], int(row["N"]), int(row["tokens"])) for row in rows}
  print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
  print("  ".join(FIELDS), flush=True)
  wanted = [row for row in wanted if row not in known]
  fits = lambda form, N, T: form in ("varlen", "gla") or args.most_rows >= N * T
  measured = turns.take([command(*row, args) for row in wanted if fits(*row)])
  for form, N, T in wanted:
    too_many = {"note": f"more than {args.most_rows} rows N T"}
    row = next(measured) if fits(form, N, T) else too_many
    row |= {"form": form, "N": N, "tokens": T}
    csv_rows.add(rows, row, FIELDS, args.out)
  print(summary(rows))
  return rows


if __name__ == "__main__":
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU
  main()

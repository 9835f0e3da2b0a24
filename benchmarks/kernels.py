"""Speed of linear attention on a GPU: the kernels, XLA's form and, if installed, fla's.

    python -m benchmarks.kernels --out docs/kernels.csv           # all cases and shapes, minutes
    python -m benchmarks.kernels --only no-decay --shapes 8,2048,16,128,128 64,1,16,128,128

A time is printed only next to an error within the limit: a corner of out, state and gradients is
compared with the float64 reference first, and everything must be finite. Times are medians over
groups of back-to-back calls that take turns among three sets of inputs; at T = 1 over chains of
steps, each updating one of three states in place. The floor moves every argument and result once
at the speed of a large copy. Where torch and fla are installed, fla's operation is measured before
(by `benchmarks.kernel_peers`, in processes of its own); "fla x" is its time in units of ours.
"""

import argparse
import statistics
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import csv_rows, kernel_peers
from benchmarks import kernel_cases as kc
from pallas_kernels.linear_attention.decode import decode

LIMIT = 0.02  # of an error: bfloat16 products give 2e-3 to 7e-3, whoever computes them
SETS = 3  # of inputs, so that the cache does not hold the next ones
FIELDS = (
  "case", "shape", "who", "forward_ms", "both_ms", "floor_ms", "floor_share", "both_floor_share",
  "fla_x", "fla_x_both", "compile_s", "error_out", "error_gradient", "note",
)  # fmt: skip
DECODE = "decode kernel"  # called directly, for T = 1


def copy_bandwidth(mebibytes: int, calls: int, groups: int) -> float:
  """Bytes per second, read and written, of a copy on the device."""
  x = jnp.zeros((mebibytes, 2**18), jnp.float32)
  copy = jax.jit(jnp.copy).lower(x).compile()
  return 2 * x.nbytes / (1e-3 * milliseconds(copy, [(x,)], calls, groups))


def milliseconds(program, arguments, calls: int, groups: int) -> float:
  """The median over groups of `calls` calls, waiting once a group."""

  def group():
    result = None
    for number in range(calls):
      result = program(*arguments[number % len(arguments)])
    jax.block_until_ready(result)

  group()
  times = []
  for _ in range(groups):
    begin = time.perf_counter()
    group()
    times.append((time.perf_counter() - begin) / calls)
  return 1e3 * statistics.median(times)


def compiled(function, *arguments, donate=()):
  """(program, seconds it took to compile)."""
  begin = time.perf_counter()
  program = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
  return program, time.perf_counter() - begin


def named(case: kc.Case, out, state) -> dict:
  """The results of a forward pass by name."""
  return {"out": out, "kv": state[0]} | ({"key_sum": state[1]} if case.normalize else {})


def errors(case: kc.Case, got: dict, want: Future) -> dict[str, float]:
  """Relative errors of the corners by name; infinite where anything is not finite."""
  want = want.result()
  finite = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))(got)
  return {
    name: kc.error(kc.corner(case, name.removeprefix("d "), x), want[name])
    if finite[name]
    else float("inf")
    for name, x in got.items()
  }


def worst(found: dict[str, float]) -> str:
  """The largest error and whose it is; NaN counts as the largest."""
  if not found:
    return ""
  name = max(found, key=lambda n: np.nan_to_num(found[n], nan=np.inf))
  return f"{found[name]:.1e} {name}"


def right(found: dict[str, float]) -> bool:
  return all(value <= LIMIT for value in found.values())  # NaN is not


def measure(case, sets, cotangent, want, who: str, calls: int, groups: int) -> dict:
  """Columns of one implementation at one shape, for T > 1."""
  forward = lambda x: kc.call(case, x, who)
  both = lambda x, w: kc.gradients(case, x, w, who)
  columns, seconds = {}, 0.0
  program, took = compiled(forward, sets[0])
  seconds += took
  out, state = program(sets[0])
  found = errors(case, named(case, out, state), want)
  columns |= {"error_out": worst(found), "forward_ms": "WRONG", "compile_s": f"{seconds:.1f}"}
  if right(found):
    columns["forward_ms"] = milliseconds(program, [(x,) for x in sets], calls, groups)
  try:
    program, took = compiled(both, sets[0], cotangent)
    out, gradient = program(sets[0], kc.only_corner(cotangent))
    found = errors(case, {f"d {name}": x for name, x in gradient.items()}, want)
    del out, gradient
    columns |= {"error_gradient": worst(found), "both_ms": "WRONG"}
    columns["compile_s"] = f"{seconds + took:.1f}"
    if right(found):
      columns["both_ms"] = milliseconds(program, [(x, cotangent) for x in sets], calls, groups)
  except NotImplementedError as reason:
    columns["note"] = f"gradient: {reason}"
  return columns


def tile_of(who: str) -> int | None:
  """The tile in "decode kernel, tile 64"; None leaves the choice to the kernel."""
  return int(who.split()[-1]) if who[-1].isdigit() else None


def one_step(case, who: str):
  """A function of (arrays without state, (kv, key_sum)): (out [B, 1, H, V], (kv, key_sum))."""
  if not who.startswith(DECODE):

    def step(x, state):
      names = ("kv", "key_sum") if case.normalize else ("kv",)
      out, new = kc.call(case, x | dict(zip(names, state, strict=False)), who)
      return out, (new.kv, new.key_sum)

    return step
  if jax.default_backend() != "gpu":
    raise NotImplementedError(f"the default device is a {jax.default_backend()}, not a GPU")

  def step(x, state):
    decay = x.get("log_decay")
    if decay is not None:  # to [B or 1, H, K or 1]
      decay = {1: lambda g: g[None, :, None], 2: lambda g: g[None]}.get(
        decay.ndim, lambda g: g.reshape(*g.shape[:1], g.shape[2], -1)
      )(decay)
    q, k, v = (x[name][:, 0] for name in "qkv")
    scale = 1.0 if case.normalize else q.shape[-1] ** -0.5
    options = {"normalize": case.normalize, "scale": scale, "tile": tile_of(who)}
    out, *state = decode(q, k, v, decay, x.get("bonus"), *state, **options)
    return out[:, None], tuple(state)

  return step


def measure_decoding(case, sets, want, who: str, calls: int, groups: int) -> dict:
  """Columns of one implementation at T = 1: a chain of steps in one program, states donated."""
  step = one_step(case, who)
  rest = [{n: x for n, x in s.items() if n not in ("kv", "key_sum")} for s in sets]
  copies = lambda: [(jnp.copy(s["kv"]), jnp.copy(s["key_sum"]) if "key_sum" in s else None)
                    for s in sets]  # fmt: skip
  out, state = jax.jit(step)(rest[0], copies()[0])
  found = errors(case, named(case, out, state), want)
  columns = {"error_out": worst(found), "forward_ms": "WRONG"}
  steps = -(-calls // SETS) * SETS

  def chain(states, rest):
    states, outs = list(states), []
    for number in range(steps):
      out, states[number % SETS] = step(rest[number % SETS], states[number % SETS])
      outs.append(out)
    return states, outs

  states = copies()
  program, seconds = compiled(chain, states, rest, donate=(0,))
  columns["compile_s"] = f"{seconds:.1f}"
  memory = program.memory_analysis()
  if memory is not None and memory.temp_size_in_bytes >= sets[0]["kv"].nbytes:
    columns["note"] = f"not in place: {memory.temp_size_in_bytes / 2**20:.0f} MiB of temporaries"
  if not right(found):
    return columns
  times = []
  for number in range(groups + 1):
    begin = time.perf_counter()
    states, _ = program(states, rest)
    jax.block_until_ready(states)
    times += [(time.perf_counter() - begin) / steps] if number else []
  return columns | {"forward_ms": 1e3 * statistics.median(times)}


def rows_of(name, case, shape: kc.Shape, implementations, tiles, bandwidth, fla: dict, options):
  """Yields the rows of our implementations for one case and shape."""
  T = shape.T
  kernels = [DECODE, *(f"{DECODE}, tile {tile}" for tile in tiles)]
  sets = [kc.make_inputs(case, shape, seed) for seed in range(SETS)]
  make = jax.jit(lambda: jax.random.normal(jax.random.key(99), (*shape[:3], shape.V), jnp.bfloat16))
  cotangent = make()
  small = {n: kc.corner(case, n, x) for n, x in sets[0].items()}
  with ThreadPoolExecutor(1) as pool:  # on the CPU, while the first program compiles
    want = pool.submit(kc.reference, case, small, kc.corner(case, "out", cotangent))
    floor = lambda gradient: 1e3 * kc.bytes_moved(sets[0], cotangent, gradient) / bandwidth
    if T == 1:  # the state is written back
      state_bytes = sum(x.nbytes for n, x in sets[0].items() if n in ("kv", "key_sum"))
      floor = lambda gradient, below=floor: below(gradient) + 1e3 * state_bytes / bandwidth
    for who in (*implementations, *(kernels if T == 1 else [])):
      row = {"case": name, "shape": str(shape), "who": who, "floor_ms": floor(False)}
      try:
        if T == 1:
          row |= measure_decoding(case, sets, want, who, **options)
        else:
          row |= measure(case, sets, cotangent, want, who, **options)
      except NotImplementedError as reason:
        row["note"] = str(reason)
      except Exception as reason:  # out of memory, a compiler's error: the other rows go on
        row["note"] = f"{type(reason).__name__}: {reason}"
      yield finished(row, (floor(False), floor(True)), fla)


def finished(row: dict, floors: tuple[float, float] | None, fla: dict) -> dict:
  """Fills in the ratios and turns numbers into text. `floors`: forward, and with gradients."""
  timed = lambda key, columns: isinstance(columns.get(key), float)
  for number, key in enumerate(("forward_ms", "both_ms")):
    if timed(key, row) and floors is not None:
      row[("floor_share", "both_floor_share")[number]] = f"{floors[number] / row[key]:.2f}"
    if timed(key, row) and timed(key, fla):
      row[("fla_x", "fla_x_both")[number]] = f"{fla[key] / row[key]:.2f}"
  row["note"] = " ".join(row.get("note", "").split())[:300]
  text = lambda x: f"{x:.4f}" if isinstance(x, float) else str(x)
  return {field: text(row.get(field, "")) for field in FIELDS}


def peer_row(case: kc.Case, row: dict, folder: Path) -> dict:
  """Columns of one of fla's results, with errors of the corner that its process has saved."""
  columns = {"who": f"fla {row['op']}", "note": row.get("failed", "")}
  if "corner" in row:
    with np.load(folder / row["corner"]) as file:
      saved = dict(file)
    got = {n: saved.pop(n) for n in list(saved) if n == "out" or n.startswith("d ")}
    want = kc.reference(case, saved, saved.pop("cotangent"))
    found = {name: kc.error(x, want[name]) for name, x in got.items()}
    of_out = {n: e for n, e in found.items() if n == "out"}
    of_gradient = {n: e for n, e in found.items() if n != "out"}
    columns |= {"error_out": worst(of_out), "error_gradient": worst(of_gradient)}
    columns["forward_ms"] = row["forward_ms"] if right(of_out) else "WRONG"
    if "both_ms" in row:
      columns["both_ms"] = row["both_ms"] if right(of_gradient) else "WRONG"
  return columns | {"compile_s": f"{row['compile_s']:.1f}" if "compile_s" in row else ""}


def line(values) -> str:
  """Columns of the printed table."""
  widths = [30, 28, 26, 10, 10, 9, 11, 16, 7, 10, 9, 12, 18, 0]
  return " ".join(f"{v:<{w}}" for v, w in zip(values, widths, strict=True)).rstrip()


def main(arguments=None):
  """Measures, printing rows as they come; returns them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", nargs="+", choices=list(kc.CASES), default=list(kc.CASES))
  parser.add_argument("--shapes", nargs="+", type=kc.Shape.parse, default=kc.SHAPES,
                      metavar="B,T,H,K,V")  # fmt: skip
  parser.add_argument("--implementations", nargs="+", default=["pallas", "chunked"])
  parser.add_argument("--tiles", nargs="+", type=int, default=[], help="of the decode kernel")
  parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True,
                      help="measure fla too, where it is installed")  # fmt: skip
  parser.add_argument("--peers-tuned", action="store_true",
                      help="fla has its tuning cached: build nothing before")  # fmt: skip
  parser.add_argument("--documents", action="store_true", help="time each case with documents too")
  parser.add_argument("--calls", type=int, default=20, help="calls in a timed group")
  parser.add_argument("--groups", type=int, default=7)
  parser.add_argument("--copy-mib", type=int, default=2048, help="size of the copy of the floor")
  parser.add_argument("--out", type=Path, help="a CSV file")
  args = parser.parse_args(arguments)
  combinations = [(name, shape) for shape in args.shapes for name in args.only
                  if shape.T > 1 or kc.CASES[name].decodes]  # fmt: skip
  rows, fla = [], {}
  add = lambda row: csv_rows.add(rows, row, FIELDS, args.out, line)
  with tempfile.TemporaryDirectory() as folder:
    # Before the first array, because JAX takes most of the GPU's memory then.
    missing = "not asked for" if not args.peers else kernel_peers.missing()
    peers = []
    if missing is None:
      peers = kernel_peers.measure(combinations, Path(folder), build=not args.peers_tuned)
    print(f"device: {jax.devices()[0].device_kind}, jax {jax.__version__}; fla: {missing or 'yes'}")
    for row in peers:
      key = row["case"], kc.Shape(*row["shape"])
      fla[key] = peer_row(kc.CASES[key[0]], row, Path(folder))
  options = {"calls": args.calls, "groups": args.groups}
  bandwidth = copy_bandwidth(args.copy_mib, **options)
  print(f"copy: {bandwidth / 1e12:.3f} TB/s", line(FIELDS), sep="\n", flush=True)
  for name, shape in combinations:
    theirs = fla.get((name, shape), {})
    if theirs:
      add(finished({"case": name, "shape": str(shape)} | theirs, None, {}))
    cases = {name: kc.CASES[name]}
    if args.documents and shape.T > 1:
      cases[f"{name} documents"] = kc.CASES[name]._replace(documents=True)
    for pair in cases.items():
      fla_row = {} if pair[1].documents else theirs
      for row in rows_of(
        *pair, shape, args.implementations, args.tiles, bandwidth, fla_row, options
      ):
        add(row)
  return rows


if __name__ == "__main__":
  main()

"""Tries configurations of an op's kernels on this GPU, and writes what is faster to its table.

    python -m benchmarks.tune diagonal_scan
    python -m benchmarks.tune linear_attention --cases channel-step --sizes T=8192,B=1 --write
    python -m benchmarks.tune wkv4 --sizes B=1,T=40,D=128 --interpret --most 3    # on a CPU

From the configuration in use each field is changed by itself: whole numbers by one, to the half and
to the double, booleans to the other; what is faster by `--gain` is kept, until nothing is. A
configuration that does not fit the shape or the device is passed over. A time counts only next to
an error within the limit: output and every gradient are compared with the float64 reference first,
as in `benchmarks.scan_kernels`.

A process of its own tries the configurations of a case. One that takes longer than `--limit`
seconds, or that ends the process, counts as failed, and another process tries the rest.

With `--write` the fields that differ from the default go to the table of this device in
`pallas_kernels/tuned/`, by op and shape class: from then on the default choice has them. With
`--interpret` the kernels run on a CPU, with a check for races: errors only, nothing is timed or
written.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("NPROC", "16")  # threads, of which interpreted kernels block some

import jax
import jax.numpy as jnp

from benchmarks import scan_kernels
from benchmarks.scan_kernels import SETS, Case, worst
from benchmarks.timing import compiled, milliseconds
from lnssm_jax import ops
from lnssm_jax.ops.cross_entropy.api import cross_entropy
from lnssm_jax.ops.rotations.api import rotations
from lnssm_jax.ops.rotations.types import CHUNK
from lnssm_jax.ops.rotations.types import Inputs as Rotations
from pallas_kernels.core import device, tuning

Changes = dict[str, Any]  # of a configuration, as in a table


def _norm(normal, n):
  x, gate = (normal(n["B"], n["T"], n["M"]).astype(jnp.bfloat16) for _ in range(2))
  return {"x": x, "gate": gate, "scale": normal(n["M"])}


def _normalize(x, gate, scale, *, implementation):
  how = {"dtype": x.dtype, "implementation": implementation}
  return ops.normalize(x, gate=gate, scale=scale, **how)


def _rotated(normal, n):
  B, T, H, N = (n[x] for x in "BTHN")
  shared = lambda: normal(B, T, 1, 1, N).astype(jnp.bfloat16)
  arrays = {"keys": shared(), "queries": shared(), "pace": normal(B, T, n["A"])}
  arrays |= {name: normal(H, 1, N) for name in ("key_offset", "query_offset")}
  return arrays | {name: normal(B, T, H) for name in ("step", "weight")}


def _rotate(*, implementation, **x):
  """(keys + queries,)."""
  (B, T, H), A, dtype = x["step"].shape, x["pace"].shape[-1], x["step"].dtype
  entering, keep = jnp.zeros((B, T // CHUNK, H, A), dtype), jnp.ones((B, T), dtype)
  inputs = Rotations(**x, entering=entering, keep=keep)
  keys, queries = rotations(inputs, dtype=x["keys"].dtype, implementation=implementation)
  return (keys + queries,)


def _logits(normal, n):
  return {"logits": normal(n["B"], n["T"], n["M"])}


def _gradient_of_loss(dtype, logits, *, implementation):
  """(gradient by the logits,)."""
  B, T, vocabulary = logits.shape
  targets = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32) % vocabulary, (B, T))
  if implementation == "reference":  # in the dtype of the logits
    onehot = jax.nn.one_hot(targets, vocabulary, dtype=logits.dtype)
    return (jax.nn.softmax(logits) - onehot,)
  how = {"gradient_dtype": dtype, "implementation": implementation}
  return (cross_entropy(logits, targets, jnp.ones((B, T), jnp.float32), **how).d_logits,)


SCANS = scan_kernels.CASES
# By the folder of kernels. Channels are M where all of them enter each number.
CASES: dict[str, dict[str, Case]] = {
  "linear_attention": scan_kernels.LINEAR_ATTENTION,
  "delta_rule": {name: SCANS[name] for name in ("delta_rule", "delta_rule gated")},
  "attention": {name: SCANS[name] for name in SCANS if name.startswith("attention documents")},
  "channel_states": {name: SCANS[name] for name in ("selective_scan", "longhorn_scan")},
  "diagonal_scan": {name: SCANS[name] for name in SCANS if name.startswith("diagonal")},
  "wkv4": {"wkv4": SCANS["wkv4"]},
  "causal_conv1d": {"causal_conv1d": SCANS["causal_conv1d"]},
  "norms": {
    "norm": Case(
      _normalize, {"x": "BTM", "gate": "BTM", "scale": "M"}, _norm,
      {"B": 8, "T": 2048, "M": 1024}, "BTM",
    )
  },
  "rotations": {
    "rotations": Case(
      _rotate,
      {"keys": "BTRGN", "queries": "BTRGN", "key_offset": "HRN", "query_offset": "HRN",
       "pace": "BTA", "step": "BTH", "weight": "BTH"},
      _rotated, {"B": 8, "T": 2048, "H": 32, "R": 1, "N": 128, "A": 32}, "BTRHN",
    )
  },
  "cross_entropy": {
    jnp.dtype(dtype).name: Case(
      functools.partial(_gradient_of_loss, dtype), {"logits": "BTM"}, _logits,
      {"B": 2, "T": 2048, "M": 32000}, "BTM",
    )
    for dtype in (jnp.bfloat16, jnp.float32)
  },
}  # fmt: skip
WITHOUT_GRADIENT = {"cross_entropy"}  # the gradient is its result


class Trial(NamedTuple):
  """The outcome of a configuration."""

  milliseconds: float | None  # None: it was wrong, or was not timed
  note: str


@contextlib.contextmanager
def configured(op: str, changes: Changes) -> Iterator[dict[str, Any]]:
  """Programs traced inside have kernels of `op` with these changes.

  Yields a dictionary, which has the default configurations by their shape classes afterwards.
  """
  defaults: dict[str, Any] = {}

  def tuned(name, shape_class, default):
    if name != op:
      return default
    defaults[shape_class] = default
    return tuning.replaced(default, changes, op)

  with mock.patch.object(tuning, "tuned", tuned):
    yield defaults


def attempt(op: str, case: Case, sets, want, changes: Changes, who: str, timing) -> Trial:
  """Compares a configuration with the reference, and times it with `timing` (calls, groups)."""
  cotangents = [arrays["cotangent"] for arrays in sets]
  inputs = [{n: x for n, x in arrays.items() if n != "cotangent"} for arrays in sets]
  corner = scan_kernels.only_corner(case.out, cotangents[0])
  try:
    with configured(op, changes):
      if op in WITHOUT_GRADIENT:
        arguments = [(x,) for x in inputs]
        program, _ = compiled(lambda x: scan_kernels.forward(case, x, who), *arguments[0])
        results = {"out": program(inputs[0])}
      else:
        arguments = list(zip(inputs, cotangents, strict=True))
        both = lambda x, w: scan_kernels.gradients(case, x, w, who)
        program, _ = compiled(both, *arguments[0])
        # Of the output, which is compared in a corner, only the corner has a cotangent.
        out, gradient = program(inputs[0], corner)
        results = {"out": out} | {f"d {name}": x for name, x in gradient.items()}
  except (ValueError, NotImplementedError) as reason:  # it does not fit
    return Trial(None, str(reason))
  except Exception as reason:  # out of registers or memory: the others are tried
    jax.block_until_ready(jnp.zeros(8) + 1)  # raises if the kernel has ruined the process
    return Trial(None, f"{type(reason).__name__}: {reason}")
  found = scan_kernels.errors(case, results, want)
  if not scan_kernels.right({**inputs[0], "out": results["out"]}, found):
    return Trial(None, f"WRONG: {worst(found)}")
  if timing is None:
    return Trial(None, f"error {worst(found)}")
  return Trial(milliseconds(program, arguments, *timing), f"error {worst(found)}")


def neighbors(config: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
  """(path of a field, another value of it) for every field of a configuration and those in it."""
  for field in dataclasses.fields(config):
    value, path = getattr(config, field.name), (*prefix, field.name)
    if dataclasses.is_dataclass(value):
      yield from neighbors(value, path)
    elif isinstance(value, bool):
      yield path, not value
    else:
      yield from ((path, x) for x in sorted({value // 2, value - 1, value + 1, 2 * value}) if x > 0)


def with_change(changes: Changes, path: tuple[str, ...], value: Any) -> Changes:
  """`changes` and one more."""
  name, *rest = path
  inner = with_change(changes.get(name, {}), tuple(rest), value) if rest else value
  return changes | {name: inner}


def search(op: str, case: Case, sizes, args, known: dict[str, Trial]) -> tuple[str, Changes]:
  """The shape class, and the changes of its default configuration that are fastest.

  Args:
    known: outcomes by changes in JSON, which are not tried again.
  """
  who = "pallas_interpret" if args.interpret else "pallas"
  timing = None if args.interpret else (args.calls, args.groups)
  seeds = range(1 if args.interpret else SETS)
  sets = [scan_kernels.make_inputs(case, sizes, seed) for seed in seeds]
  arrays = {n: x for n, x in sets[0].items() if n != "cotangent"}
  want = reference(op, case, arrays, sets[0]["cotangent"])
  with configured(op, {}) as defaults:
    jax.eval_shape(lambda x: scan_kernels.forward(case, x, who), arrays)
  if len(defaults) != 1:
    raise SystemExit(f"--sizes: kernels of {len(defaults)} shape classes; use sizes that need one.")
  ((shape_class, default),) = defaults.items()

  def tried_as(name: str, changes: Changes) -> Trial:
    key = json.dumps(changes, sort_keys=True)
    if key not in known:
      print(json.dumps({"begin": name, "changes": key}), flush=True)
      known[key] = attempt(op, case, sets, want, changes, who=who, timing=timing)
      print(json.dumps({"end": key, "trial": known[key]}), flush=True)
      print(f"{name}: {_line(known[key])}", flush=True)
    return known[key]

  chosen, best = {}, tried_as(f"{op}, {shape_class}, default", {})
  tried, improved = {json.dumps({})}, True
  while improved:
    improved = False
    for path, value in neighbors(tuning.replaced(default, chosen, op)):
      changes = with_change(chosen, path, value)
      key = json.dumps(changes, sort_keys=True)
      if key in tried or len(tried) > args.most:
        continue
      tried.add(key)
      trial = tried_as(f"  {'.'.join(path)}={value}", changes)
      times = trial.milliseconds, best.milliseconds
      if None not in times and times[0] < (1 - args.gain) * times[1]:
        chosen, best, improved = changes, trial, True
  return shape_class, chosen


def reference(op: str, case: Case, arrays, cotangent):
  """Output, and gradients if there are any, of the corner in float64."""
  if op not in WITHOUT_GRADIENT:
    return scan_kernels.reference(case, arrays, cotangent)
  cpu = jax.local_devices(backend="cpu")[0]
  with jax.enable_x64(True), jax.default_device(cpu):
    small = {n: scan_kernels.corner(case.axes[n], x) for n, x in arrays.items()}
    wide = {n: jnp.asarray(jax.device_get(x), jnp.float64) for n, x in small.items()}
    return {"out": jax.device_get(scan_kernels.forward(case, wide, "reference"))}


def _line(trial):
  time = "" if trial.milliseconds is None else f"{trial.milliseconds:.4f} ms, "
  return time + " ".join(trial.note.split())[:200]


def watched(command: Sequence[str], limit: float) -> dict[str, Changes]:
  """The changes by shape class that `command`, a process with `--one`, found.

  A trial that takes longer than `limit` seconds, or that ends the process, has failed: the process
  is started again, and knows that.

  Raises:
    SystemExit: the process failed outside of a trial.
  """
  known: dict[str, Trial] = {}
  while True:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    late = threading.Event()
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:

      def end(process=process, late=late):
        late.set()
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, signal.SIGKILL)

      try:
        trial, found = _follow(process, known, lambda end=end: threading.Timer(limit, end))
      except BaseException:
        end()
        raise
    if found is not None:
      return found
    if trial is not None:
      name, key = trial
      status = f"ended its process with {process.returncode}"
      known[key] = Trial(None, f"not finished after {limit:g} s" if late.is_set() else status)
      print(f"{name}: {known[key].note}", flush=True)
    elif not late.is_set():
      raise SystemExit(process.returncode or 1)


def _follow(process, known: dict[str, Trial], timer) -> tuple[tuple[str, str] | None, Any]:
  """Reads a process to its end, each trial under a timer.

  Returns the name and changes of a trial that did not end, and what the process found, if any.
  """
  with contextlib.suppress(BrokenPipeError):  # it has ended, and said why
    process.stdin.write(json.dumps(known) + "\n")
    process.stdin.close()
  trial, found, running = None, None, timer()
  for line in process.stdout:
    said = json.loads(line) if line.startswith("{") else {}
    running.cancel()
    if "begin" in said:
      trial, running = (said["begin"], said["changes"]), timer()
      running.start()
    elif "end" in said:
      trial, known[said["end"]] = None, Trial(*said["trial"])
    elif "found" in said:
      found = said["found"]
    else:
      print(line, end="", flush=True)
  running.cancel()
  return trial, found


def write(op: str, shape_class: str, changes: Changes) -> None:
  """Puts changes into the table of the current device; none of them remove an entry."""
  path = tuning.table_path(device.current().kind)
  table = {name: dict(entries) for name, entries in tuning.table(path).items()}
  entries = table.setdefault(op, {})
  entries.pop(shape_class, None)
  if changes:
    entries[shape_class] = changes
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
  tuning.table.cache_clear()
  print(f"{path}: {op}, {shape_class}: {json.dumps(changes)}")


def main(arguments=None):
  """Tunes the cases of one op; returns the changes by shape class."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("op", choices=list(CASES), help="a folder of pallas_kernels")
  parser.add_argument("--cases", nargs="+", metavar="CASE", help="of the op; default: all")
  parser.add_argument("--sizes", type=scan_kernels.parse_sizes, default={}, metavar="B=1,T=8192",
                      help="other sizes of these axes")  # fmt: skip
  parser.add_argument("--interpret", action="store_true", help="on a CPU: errors, no times")
  parser.add_argument("--most", type=int, default=200, help="configurations to try per case")
  parser.add_argument("--gain", type=float, default=0.01, help="least share of time gained")
  parser.add_argument("--calls", type=int, default=20, help="calls in a timed group")
  parser.add_argument("--groups", type=int, default=7)
  parser.add_argument("--limit", type=float, default=180, metavar="SECONDS",
                      help="longest time of one configuration, with its compilation")  # fmt: skip
  parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
  parser.add_argument("--write", action="store_true", help="to the table of this device")
  args = parser.parse_args(arguments)
  cases = CASES[args.op]
  for name in args.cases or ():
    if name not in cases:
      parser.error(f"--cases: {args.op} has no case {name!r}; use one of {', '.join(cases)}")
  if args.write and args.interpret:
    parser.error("--write: an interpreted kernel has no time; leave out --interpret")
  if args.limit <= 0:
    parser.error(f"--limit {args.limit:g} must be more than 0 seconds, such as --limit 180")
  names = args.cases or list(cases)
  if args.one:
    return _one(args, *names)
  given, found = list(sys.argv[1:] if arguments is None else arguments), {}
  for name in names:  # this process leaves the GPU to its children
    command = [sys.executable, "-m", "benchmarks.tune", *given, "--cases", name, "--one"]
    found |= watched(command, args.limit)
  return found


def _one(args, name: str) -> dict[str, Changes]:
  """Tunes a case in this process, but for the trials that stdin knows; prints what it found."""
  if not args.interpret and (reason := device.unsupported()):
    print(f"error: {reason}; with --interpret kernels run on a CPU", file=sys.stderr)
    raise SystemExit(2)
  print(f"device: {jax.devices()[0].device_kind}, jax {jax.__version__}")
  known = {key: Trial(*trial) for key, trial in json.loads(sys.stdin.readline() or "{}").items()}
  case = CASES[args.op][name]
  sizes = {axis: args.sizes.get(axis, size) for axis, size in case.sizes.items()}
  shape_class, changes = search(args.op, case, sizes, args, known)
  if args.write:
    write(args.op, shape_class, changes)
  print(json.dumps({"found": {shape_class: changes}}))
  return {shape_class: changes}


if __name__ == "__main__":
  main()

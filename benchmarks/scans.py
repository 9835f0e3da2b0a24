"""Time and peak memory of every form of every scan against length and width, on the CPU.

    python -m benchmarks.scans                      # all: writes docs/scans.csv, prints the tables
    python -m benchmarks.scans --scans wkv4 --lengths 512 1024 --output /tmp/scans.csv

A row is timed only after its values and gradients agree with the float64 reference within the
contract's limit; otherwise the row says by how much they do not. Memory is what the compiled
program allocates: arguments, results and temporaries. The exponent is the slope of a straight line
through the logarithms of time (or memory) and length (or width): 1 is linear. Times of one machine
that does nothing else; compare rows of one run.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import csv_rows, numerics
from benchmarks.timing import allocated
from lnssm_jax.ops.cases import SCANS
from lnssm_jax.ops.core import accuracy

LENGTHS = (1024, 2048, 4096)
WIDTHS = (16, 32, 64)  # of K and V, or D; lengths are measured at the first, widths at length 1024
FIELDS = ("scan", "form", "pass", "T", "width", "ms", "mib", "error", "limit")


def cases_of(name: str, length: int, width: int):
  """[(case, forms)]: the scan's case of the table of errors in another width.

  Further cases of that table count if they have forms of their own, as taps next to exponentials.
  """
  scan, cases, seen = SCANS[name], [], set()
  for case_of in (scan.measured, *scan.measured_too.values()):
    case = case_of(length, "ordinary")
    axes = {field.name for field in dataclasses.fields(case)} & {"D", "K", "V"}
    case = dataclasses.replace(case, **dict.fromkeys(axes, width))
    forms = numerics.forms(scan, case, scan.inputs(case))
    if not seen.issuperset(forms):
      cases.append((case, [*forms, "reference"]))
      seen.update(forms)
  return cases


def milliseconds(program, inputs, budget=0.3) -> float:
  """The median of at least 3 runs, or of as many as fit into `budget` seconds."""
  jax.block_until_ready(program(inputs))
  times = []
  while len(times) < 3 or sum(times) < budget:
    begin = time.perf_counter()
    jax.block_until_ready(program(inputs))
    times.append(time.perf_counter() - begin)
  return 1e3 * statistics.median(times)


def measure(name: str, length: int, width: int) -> list[dict]:
  """The rows of one scan at one length and width."""
  cases = cases_of(name, length, width)
  return [row for case, forms in cases for row in measure_case(name, case, forms, width)]


def measure_case(name: str, case, forms: list[str], width: int) -> list[dict]:
  """The rows of one case."""
  scan, length, rows = SCANS[name], case.T, []
  call = lambda form: lambda x: scan.compared(*scan(case, x, implementation=form))
  inputs = {n: accuracy.round_to(x, jnp.float32) for n, x in scan.inputs(case).items()}
  with jax.enable_x64(True):
    exact = jax.tree.map(jnp.asarray, inputs)
    want = jax.tree.map(np.asarray, accuracy.values_and_gradients(call("reference"), exact))
  passed = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), inputs)
  limit = accuracy.tolerance(jnp.float32, length)
  for form in forms:
    programs = {
      "forward": (lambda x, f=form: {"values": call(f)(x)}),
      "forward+backward": accuracy.with_gradients(call(form)),
    }
    for direction, fn in programs.items():
      program = jax.jit(fn).lower(passed).compile()
      got = program(passed)
      found = accuracy.named_errors(got, {key: want[key] for key in got})
      error = np.max(list(found.values()))  # NaN if any is
      right = error <= limit  # NaN is not
      values = (
        name,
        f"{form} taps" if getattr(case, "kernel", "") == "taps" else form,
        direction,
        length,
        width,
        f"{milliseconds(program, passed):.3f}" if right else "wrong",
        f"{allocated(program) / 2**20:.2f}",
        f"{error:.1e}",
        f"{limit:.1e}",
      )
      rows.append(dict(zip(FIELDS, values, strict=True)))
      print(*values, sep=",", file=sys.stderr)
  return rows


def exponent(rows: list[dict], axis: str, quantity: str) -> str:
  """The slope of log(quantity) over log(axis), or "-" where a row is wrong."""
  if len(rows) < 2 or any(row[quantity] == "wrong" for row in rows):
    return "-"
  x, y = (np.log([float(row[key]) for row in rows]) for key in (axis, quantity))
  return f"{np.polyfit(x, y, 1)[0]:.2f}"


def summary(rows: list[dict]) -> str:
  """One line per scan, form and pass: the longest length, and the four exponents."""
  longest, narrow = max(int(row["T"]) for row in rows), min(int(row["width"]) for row in rows)
  columns = ["scan", "form", "pass", f"ms at T = {longest:,}", "MiB", "ms ~ T^", "MiB ~ T^"]
  columns += ["ms ~ width^", "MiB ~ width^", "largest error"]
  lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
  for key in dict.fromkeys((r["scan"], r["form"], r["pass"]) for r in rows):
    mine = [r for r in rows if (r["scan"], r["form"], r["pass"]) == key]
    by_length = [r for r in mine if int(r["width"]) == narrow]
    by_width = [r for r in mine if int(r["T"]) == min(int(r["T"]) for r in mine)]
    last = max(by_length, key=lambda r: int(r["T"]))
    slopes = [
      exponent(series, axis, quantity)
      for axis, series in (("T", by_length), ("width", by_width))
      for quantity in ("ms", "mib")
    ]
    worst = max(mine, key=lambda r: float(r["error"]))["error"]
    lines.append(f"| {' | '.join([*key, last['ms'], last['mib'], *slopes, worst])} |")
  return "\n".join(lines)


def main():
  """Measures, writes the rows, prints the summary."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--scans", nargs="+", choices=list(SCANS), default=list(SCANS))
  parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
  parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS))
  parser.add_argument("--output", type=Path, default=Path("docs/scans.csv"))
  parser.add_argument("--keep", action="store_true", help="keep the rows of scans not named")
  args = parser.parse_args()
  shapes = [(length, args.widths[0]) for length in args.lengths]
  shapes += [(args.lengths[0], width) for width in args.widths[1:]]
  rows = csv_rows.read(args.output, without=args.scans) if args.keep else []
  for name in args.scans:
    rows += [row for shape in shapes for row in measure(name, *shape)]
    csv_rows.write(args.output, FIELDS, rows)  # at once: a later failure loses nothing
  print(summary(rows))


if __name__ == "__main__":
  main()

"""Measures the error of every scan against its reference in float64, all gradients included.

    python -m benchmarks.numerics                       # everything: writes docs/numerics.csv and
                                                        # .png, the tables in docs/numerics.md
    python -m benchmarks.numerics --scans wkv4 --lengths 1024 --output /tmp/numerics

An error is ||got - want|| / ||want|| over a whole tensor. Both sides see the same inputs, rounded
to the dtype. Needs matplotlib (`pip install -e .[plots]`).
"""

import argparse
import csv
import multiprocessing
import sys
import time
from concurrent import futures
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib import pyplot as plt

from tests.ops import contract
from tests.ops.scans import SCANS

matplotlib.use("Agg")

LENGTHS = (1024, 16384, 131072)
STRENGTHS = ("weak", "ordinary", "extreme")
FIELDS = ("scan", "implementation", "dtype", "tensor", "T", "strength", "error", "limit")
DOCUMENT = Path("docs/numerics.md")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def tensor_name(path: str) -> str:
  """ "d log_decay" for "['gradients']['log_decay']", "state.kv" for "['values']['state'].kv"."""
  kind, _, rest = path.strip("[]'").partition("']")
  name = rest.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "").strip(".")
  return f"d {name}" if kind == "gradients" else name


def measure(name: str, lengths=LENGTHS, strengths=STRENGTHS) -> list[dict]:
  """The rows of one scan: every implementation in float32, the preferred one in bfloat16 too."""
  scan, rows = SCANS[name], []
  for length in lengths:
    cases = {strength: scan.measured(length, strength) for strength in strengths}
    case = cases[strengths[0]]
    call = lambda inputs, form, case=case: scan.compared(*scan(case, inputs, implementation=form))
    inputs = {strength: scan.inputs(case) for strength, case in cases.items()}
    # Strength is in the inputs alone: one compiled program serves all of them.
    sample = jax.tree.map(jnp.asarray, inputs[strengths[0]])
    for form, dtype in forms(scan, case, sample):
      dtypes = {n: dtype if n in scan.narrow else jnp.float32 for n in sample}
      begin, program, reference = time.perf_counter(), None, None
      for strength in strengths:
        rounded = jax.tree.map(contract.round_to, inputs[strength], dtypes)
        with jax.enable_x64(True):
          exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), rounded)
          if reference is None:
            reference = jax.jit(contract.with_gradients(lambda x: call(x, "reference"), exact))  # noqa: B023
          want = jax.tree.map(np.asarray, reference(exact))
        passed = jax.tree.map(jnp.asarray, rounded, dtypes)
        if program is None:
          program = jax.jit(contract.with_gradients(lambda x: call(x, form), passed))  # noqa: B023
        got = jax.tree.map(np.asarray, program(passed))
        for path, error in contract.named_errors(got, want).items():
          rows.append(
            {
              "scan": name,
              "implementation": form,
              "dtype": jnp.dtype(dtype).name,
              "tensor": tensor_name(path),
              "T": length,
              "strength": strength,
              "error": f"{error:.3e}",
              "limit": f"{contract.tolerance(dtype, length):.3e}",
            }
          )
      seconds = time.perf_counter() - begin
      print(f"{name} {form} {jnp.dtype(dtype).name} T={length}: {seconds:.0f} s", file=sys.stderr)
  return rows


def forms(scan, case, inputs) -> list[tuple[str, jnp.dtype]]:
  """What is measured of a scan: the forms of its contract, and the preferred one in bfloat16."""
  names = list(dict.fromkeys(check.implementation for check in scan.checks))
  return [(form, jnp.float32) for form in names] + [(names[0], jnp.bfloat16)]


def summary(rows: list[dict]) -> str:
  """One line per scan, implementation and dtype: the worst tensor at each length."""
  lengths = sorted({int(row["T"]) for row in rows})
  columns = ["scan", "form", "dtype", *(f"T = {n:,}" for n in lengths)]
  columns += ["nearest to its limit", "share of it"]
  lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
  for key in dict.fromkeys((r["scan"], r["implementation"], r["dtype"]) for r in rows):
    mine = [r for r in rows if (r["scan"], r["implementation"], r["dtype"]) == key]
    share = lambda r: float(r["error"]) / float(r["limit"])
    cells = [
      f"{max((float(r['error']) for r in mine if int(r['T']) == n), default=float('nan')):.1e}"
      for n in lengths
    ]
    worst = max(mine, key=share)
    where = f"`{worst['tensor']}`, {worst['strength']}"
    lines.append(f"| {' | '.join([*key, *cells, where])} | {share(worst):.2f} |")
  return "\n".join(lines)


def details(rows: list[dict]) -> str:
  """A table per scan: every tensor, at every length and strength."""
  lengths = sorted({int(row["T"]) for row in rows})
  columns = [(n, s) for n in lengths for s in STRENGTHS]
  parts = []
  for scan in dict.fromkeys(row["scan"] for row in rows):
    mine = [row for row in rows if row["scan"] == scan]
    values = {
      (r["implementation"], r["dtype"], r["tensor"], int(r["T"]), r["strength"]): r for r in mine
    }
    head = " | ".join(f"{n // 1024}k {s}" for n, s in columns)
    lines = [f"### `{scan}`", "", f"| form | dtype | tensor | {head} |"]
    lines.append("|---|---|---|" + "---|" * len(columns))
    for key in dict.fromkeys(key[:3] for key in values):
      cells = [values.get((*key, *column)) for column in columns]
      cells = [f"{float(cell['error']):.1e}" if cell else "" for cell in cells]
      lines.append(f"| {' | '.join([key[0], key[1], f'`{key[2]}`', *cells])} |")
    parts.append("\n".join(lines))
  return "\n\n".join(parts)


def draw(rows: list[dict], path: Path):
  """One panel a dtype: the worst error of each scan against the length, and the limit."""
  dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
  figure, axes = plt.subplots(
    1, len(dtypes), figsize=(5.5 * len(dtypes), 4.2), layout="constrained", squeeze=False
  )
  for axis, dtype in zip(axes[0], dtypes, strict=True):
    mine = [row for row in rows if row["dtype"] == dtype]
    lengths = sorted({int(row["T"]) for row in mine})
    for color, scan in enumerate(SCANS):
      of_scan = [row for row in mine if row["scan"] == scan]
      styles = ["-", "--", ":", "-."]
      for form, style in zip(
        dict.fromkeys(r["implementation"] for r in of_scan), styles, strict=False
      ):
        worst = [
          max(
            float(r["error"]) for r in of_scan if r["implementation"] == form and int(r["T"]) == n
          )
          for n in lengths
        ]
        axis.plot(lengths, worst, style, color=f"C{color}", marker=".", label=f"{scan} {form}")
    limits = [max(float(r["limit"]) for r in mine if int(r["T"]) == n) for n in lengths]
    axis.plot(lengths, limits, color="black", linewidth=2, label="limit of the contract")
    axis.set(xscale="log", yscale="log", xlabel="steps", title=dtype)
    axis.set_ylabel("largest relative error, values and gradients")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=6)
  figure.savefig(path, dpi=110)


def main():
  """Measures, writes the rows, draws them, and puts the tables into the document."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--scans", nargs="+", choices=list(SCANS), default=list(SCANS))
  parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
  parser.add_argument("--jobs", type=int, default=2, help="scans measured at a time")
  parser.add_argument("--output", default="docs/numerics", help="without .csv and .png")
  parser.add_argument("--keep", action="store_true", help="keep the rows of scans not named")
  args = parser.parse_args()
  table = Path(f"{args.output}.csv")
  rows = []
  if args.keep and table.exists():
    with table.open() as file:
      rows = [row for row in csv.DictReader(file) if row["scan"] not in args.scans]
  context = multiprocessing.get_context("spawn")
  with futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
    for measured in pool.map(measure, args.scans, [args.lengths] * len(args.scans)):
      rows += measured
  rows.sort(key=lambda row: list(SCANS).index(row["scan"]))
  with table.open("w", newline="") as file:
    writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
  print(summary(rows))
  draw(rows, Path(f"{args.output}.png"))
  if args.output == parser.get_default("output"):
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    body = f"{summary(rows)}\n\n{details(rows)}"
    DOCUMENT.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}")


if __name__ == "__main__":
  main()

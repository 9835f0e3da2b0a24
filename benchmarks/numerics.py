"""Measures the error of every scan against its reference in float64, all gradients included.

    python -m benchmarks.numerics                       # everything: writes docs/numerics.csv and
                                                        # .png, the tables in docs/numerics.md
    python -m benchmarks.numerics --scans wkv4 --lengths 1024 --output /tmp/numerics

An error is ||got - want|| / ||want|| over a whole tensor. Both sides see the same inputs, rounded
to the dtype. Needs matplotlib (`pip install -e .[train]`).
"""

import argparse
import importlib.util
import itertools
import multiprocessing
import sys
import time
from concurrent import futures
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import csv_rows
from lnssm_jax.ops.cases import SCANS
from lnssm_jax.ops.core import accuracy, dispatch

LENGTHS = (1024, 16384, 131072)
STRENGTHS = ("weak", "ordinary", "extreme", "lasting")
FIELDS = ("scan", "form", "dtype", "tensor", "T", "strength", "error", "limit")
DOCUMENT = Path("docs/numerics.md")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def tensor_name(path: str) -> str:
  """ "d log_decay" for "['gradients']['log_decay']", "state.kv" for "['values']['state'].kv"."""
  kind, _, rest = path.strip("[]'").partition("']")
  name = rest.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "").strip(".")
  return f"d {name}" if kind == "gradients" else name


def measure(name: str, lengths=LENGTHS) -> list[dict]:
  """The rows of one scan: every form in float32, the preferred one in bfloat16 too."""
  scan, rows = SCANS[name], []
  for label, case_of in {"": scan.measured, **scan.measured_too}.items():
    for length in lengths:
      inputs = {s: scan.inputs(case_of(length, s)) for s in scan.strengths}
      # Strength is in the inputs alone: one compiled program serves all of them.
      case = case_of(length, scan.strengths[0])
      call = lambda x, form, case=case: scan.compared(*scan(case, x, implementation=form))
      available = forms(scan, case, inputs[scan.strengths[0]])
      exact_form = "reference"
      if length > scan.longest_reference.get(label, length):
        exact_form = available[0]  # in float64, itself compared with the reference where that runs
      with jax.enable_x64(True):
        wide = jax.tree.map(jnp.asarray, inputs[scan.strengths[0]])
        exact = jax.jit(accuracy.with_gradients(lambda x: call(x, exact_form)))  # noqa: B023
      for form, dtype in [
        *((form, jnp.float32) for form in available),
        (available[0], jnp.bfloat16),
      ]:
        begin = time.perf_counter()
        dtypes = {n: dtype if n in scan.narrow else jnp.float32 for n in wide}
        program = None
        for strength in scan.strengths:
          rounded = jax.tree.map(accuracy.round_to, inputs[strength], dtypes)
          with jax.enable_x64(True):
            want = jax.tree.map(np.asarray, exact(jax.tree.map(jnp.asarray, rounded)))
          passed = jax.tree.map(jnp.asarray, rounded, dtypes)
          if program is None:
            program = jax.jit(accuracy.with_gradients(lambda x: call(x, form)))  # noqa: B023
          got = jax.tree.map(np.asarray, program(passed))
          values = (
            name,
            " ".join([form, *filter(None, [label])]),
            jnp.dtype(dtype).name,
            length,
            strength,
            f"{accuracy.tolerance(dtype, length):.3e}",
          )
          row = dict(zip(("scan", "form", "dtype", "T", "strength", "limit"), values, strict=True))
          errors = accuracy.named_errors(got, want)
          rows += [row | {"tensor": tensor_name(p), "error": f"{e:.3e}"} for p, e in errors.items()]
        seconds = time.perf_counter() - begin
        print(f"{' '.join(map(str, values[:4]))}: {seconds:.0f} s", file=sys.stderr)
  return rows


def forms(scan, case, inputs) -> list[str]:
  """The forms that can run this case, as preferred.

  Without the step-by-step one and the interpreted kernels, which would take hours.
  """
  args, options = scan.bind(case, inputs)
  able = dispatch.supported(scan.function, *args, **options)
  return [name for name in able if name != "reference" and not name.endswith("_interpret")]


def summary(rows: list[dict]) -> str:
  """One line per scan, implementation and dtype: the worst tensor at each length."""
  lengths = sorted({int(row["T"]) for row in rows})
  columns = ["op", "form", "dtype", *(f"T = {n:,}" for n in lengths)]
  columns += ["nearest to its limit", "share of it"]
  lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
  for key in dict.fromkeys((r["scan"], r["form"], r["dtype"]) for r in rows):
    mine = [r for r in rows if (r["scan"], r["form"], r["dtype"]) == key]
    share = lambda r: float(r["error"]) / float(r["limit"])
    cells = [
      f"{max((float(r['error']) for r in mine if int(r['T']) == n), default=float('nan')):.1e}"
      for n in lengths
    ]
    worst = max(mine, key=share)
    where = f"`{worst['tensor']}`, {worst['strength']}"
    lines.append(f"| {' | '.join([*key, *cells, where])} | {share(worst):.2f} |")
  return "\n".join(lines)


def draw(rows: list[dict], path: Path):
  """One panel a dtype: the worst error of each scan against the length, and the limit."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
  figure, axes = plt.subplots(
    1, len(dtypes), figsize=(6.5 * len(dtypes), 4.2), layout="constrained", squeeze=False
  )
  for axis, dtype in zip(axes[0], dtypes, strict=True):
    mine = [row for row in rows if row["dtype"] == dtype]
    lengths = sorted({int(row["T"]) for row in mine})
    for color, scan in enumerate(SCANS):
      of_scan = [row for row in mine if row["scan"] == scan]
      styles = itertools.cycle(["-", "--", ":", "-.", (0, (1, 3)), (0, (6, 2, 1, 2))])
      for form, style in zip(dict.fromkeys(r["form"] for r in of_scan), styles, strict=False):
        worst = [
          max(float(r["error"]) for r in of_scan if r["form"] == form and int(r["T"]) == n)
          for n in lengths
        ]
        axis.plot(
          lengths, worst, linestyle=style, color=f"C{color}", marker=".", label=f"{scan} {form}"
        )
    limits = [max(float(r["limit"]) for r in mine if int(r["T"]) == n) for n in lengths]
    axis.plot(lengths, limits, color="black", linewidth=2, label="limit of the contract")
    axis.set(xscale="log", yscale="log", xlabel="steps", title=dtype)
    axis.set_ylabel("largest relative error, values and gradients")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
  figure.savefig(path, dpi=110)


def main():
  """Measures, writes the rows, draws them, and puts the table into the page."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--scans", nargs="+", choices=list(SCANS), default=list(SCANS))
  parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
  parser.add_argument("--jobs", type=int, default=2, help="scans measured at a time")
  parser.add_argument("--output", default="docs/numerics", help="without .csv and .png")
  parser.add_argument("--keep", action="store_true", help="keep the rows of scans not named")
  args = parser.parse_args()
  if importlib.util.find_spec("matplotlib") is None:
    parser.error("matplotlib is missing; install it with: pip install -e .[train]")
  table = Path(f"{args.output}.csv")
  rows = csv_rows.read(table, without=args.scans) if args.keep else []
  context = multiprocessing.get_context("spawn")
  with futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
    tasks = [pool.submit(measure, name, args.lengths) for name in args.scans]
    for task in futures.as_completed(tasks):
      rows = sorted(rows + task.result(), key=lambda row: list(SCANS).index(row["scan"]))
      csv_rows.write(table, FIELDS, rows)  # at once: a later failure loses nothing
  print(summary(rows))
  draw(rows, Path(f"{args.output}.png"))
  if args.output == parser.get_default("output"):
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{summary(rows)}\n{END}{after}")


if __name__ == "__main__":
  main()

"""The table of `benchmarks.scan_kernels` as a picture: time and error, ours next to fla's.

    python -m benchmarks.plot_kernels docs/kernels.csv --output docs/kernels.png

Only cases that have both are drawn, and only times that stand next to a right result.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from benchmarks import csv_rows

NAMES = {
  "scalar-constant": "constant decay per head\n(RetNet, TNL)",
  "scalar-step": "decay per step and head\n(Mamba-2)",
  "channel-constant-normalized": "constant decay per channel,\nnormalized (LNSSM); fla: no decay",
  "channel-step": "decay per step and channel\n(GLA)",
  "channel-step-bonus": "the same with a bonus\n(RWKV-6)",
}
OURS, THEIRS = "lnssm_jax", "flash-linear-attention"
COLORS = {OURS: "#1f4e79", THEIRS: "#c9a227"}


class Bar(NamedTuple):
  """The result of one library for one case."""

  forward_ms: float
  both_ms: float
  error: float  # relative, to the float64 recurrence; the largest of output and gradients


def bars(rows: list[dict]) -> dict[str, dict[str, Bar]]:
  """{case: {library: Bar}} of the cases that both libraries give right.

  Raises:
    ValueError: there is none, or the rows have several shapes.
  """
  found: dict[str, dict[str, Bar]] = {}
  shapes = {row["sizes"] for row in rows}
  if len(shapes) != 1:
    raise ValueError(f"the table has the shapes {sorted(shapes)}, must have one; measure one.")
  for row in rows:
    library = {"pallas": OURS, "fla": THEIRS}.get(row["who"].split(" ")[0])
    try:
      times = float(row["forward_ms"]), float(row["both_ms"])
    except ValueError:  # WRONG, or nothing
      continue
    if library and row["scan"] in NAMES:
      errors = [float(row[name].split()[0]) for name in ("error_out", "error_gradient")]
      found.setdefault(row["scan"], {})[library] = Bar(*times, max(errors))
  complete = {case: found[case] for case in NAMES if len(found.get(case, {})) == 2}
  if not complete:
    raise ValueError("no case has a time of both libraries; measure with fla installed.")
  return complete


def draw(complete: dict[str, dict[str, Bar]], title: str, output: Path) -> None:
  """Writes the picture, PNG or whatever the suffix says."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, (times, errors) = plt.subplots(
    1, 2, figsize=(11, 4.2), sharey=True, width_ratios=(3, 1), layout="constrained"
  )
  for place, libraries in enumerate(complete.values()):
    for offset, library in ((-0.2, OURS), (0.2, THEIRS)):
      bar = libraries[library]
      at = {"y": place + offset, "height": 0.36, "color": COLORS[library]}
      label = library if place == 0 else None
      times.barh(width=bar.both_ms, alpha=0.45, **at)
      times.barh(width=bar.forward_ms, label=label, **at)
      text = f" {bar.forward_ms:.3f} / {bar.both_ms:.3f}"
      times.text(bar.both_ms, place + offset, text, va="center", fontsize=8)
      errors.plot(bar.error, place + offset, "o", color=COLORS[library])
  times.set_yticks(range(len(complete)), [NAMES[name] for name in complete], fontsize=8)
  times.invert_yaxis()
  times.margins(x=0.15)
  times.set_xlabel("ms: forward (dark), forward + backward (whole)")
  times.legend(loc="upper right", fontsize=8)
  errors.set_xscale("log")
  errors.set_xlim(5e-4, 5e-2)  # above 2e-2 a result counts as wrong
  errors.set_xlabel("largest relative error\nto the float64 recurrence")
  errors.grid(axis="x", alpha=0.3)
  figure.suptitle(title, fontsize=10)
  figure.savefig(output, dpi=150)
  plt.close(figure)


def main(arguments=None) -> None:
  """Reads the table and draws it."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("table", type=Path, help="a CSV file of `benchmarks.scan_kernels`")
  parser.add_argument("--output", type=Path, required=True)
  parser.add_argument("--title", default="Linear attention, one H200, bfloat16")
  args = parser.parse_args(arguments)
  rows = csv_rows.read(args.table, without=[])
  complete = bars(rows)
  draw(complete, f"{args.title}, {rows[0]['sizes']}", args.output)


if __name__ == "__main__":
  main()

"""The plot of a sweep: a score against a label or the learning rate, mean and spread over seeds."""

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lnssm_jax.files.atomic import replace_file
from train.sweeps.spec import Plot

Row = dict[str, Any]

_SHIFT = 0.012  # between two lines, as a share of the axis
_MOST_TICKS = 16  # of which each has its label


def draw_curves(rows: Sequence[Row], plot: Plot, score: str, output: Path) -> None:
  """Draws learning curves (`tables.curves`), with a panel per place on the axis of `plot`."""
  panel = plot.panel or (None if plot.x == "learning_rate" else plot.x)
  draw(rows, dataclasses.replace(plot, x="step", panel=panel), score, output)


def draw(
  rows: Sequence[Row],
  plot: Plot,
  score: str,
  output: Path,
  *,
  bars: Literal["range", "std"] = "range",
  share_y: bool = True,
) -> None:
  """Writes the picture of a table (`tables.table`) in the format of the suffix of `output`.

  Against a label, the best learning rate for each combination is drawn; against "learning_rate",
  all are. A point is the mean over seeds, a bar goes from the least to the largest value or has the
  standard deviation to each side. Labels of which the plot says nothing are part of a line's name,
  where they differ. A line has the same color and marker in all panels, which share their vertical
  axis if `share_y`, and is shifted a little, so that no bar hides another.

  Raises:
    ValueError: there is nothing to draw yet.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  kept = [row for row in rows if row.get(score) is not None]
  kept = [row for row in kept if all(row.get(k) == v for k, v in plot.where.items())]
  if plot.x != "learning_rate":
    kept = [row for row in kept if row["best"]]
  if not kept:
    raise ValueError("no learning rate has all its seeds finished, so there is nothing to draw.")
  values = lambda name: list(dict.fromkeys(row.get(name) for row in kept))
  panels: list[Any] = values(plot.panel) if plot.panel else [None]
  if all(isinstance(panel, int | float) for panel in panels):
    panels.sort()
  labels = list(
    dict.fromkeys(x for row in kept for x in list(row)[: list(row).index("parameters")])
  )
  others = [name for name in labels if name not in (plot.x, plot.panel) and len(values(name)) > 1]
  title = [plot.line, *(name for name in others if name != plot.line)] if plot.line else others
  line_of = lambda row: ", ".join(str(row.get(name)) for name in title)
  lines = list(dict.fromkeys(map(line_of, kept)))
  columns = min(3, len(panels))
  shape = (-(-len(panels) // columns), columns)
  size = (3.6 * columns + 1.6, 3.0 * shape[0])
  figure, axes = plt.subplots(
    *shape, figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=share_y
  )
  colors, markers = plt.get_cmap("tab10" if len(lines) <= 10 else "tab20"), "osD^vP*X<>"
  is_number = all(isinstance(row[plot.x], int | float) for row in kept)
  places: list[Any] = values(plot.x)
  ticks = sorted(places) if is_number else list(range(len(places)))
  is_log = is_number and ticks[0] > 0 and plot.x != "step"
  for axis, panel in zip(axes.flat, panels, strict=False):
    for number, line in enumerate(lines):
      points = [row for row in kept if line_of(row) == line]
      points = [row for row in points if plot.panel is None or row.get(plot.panel) == panel]
      if not points:
        continue
      if is_number:
        points.sort(key=lambda row: row[plot.x])
      x = [row[plot.x] if is_number else places.index(row[plot.x]) for row in points]
      shift = (number - (len(lines) - 1) / 2) * _SHIFT
      if is_log:
        x = [value * (ticks[-1] / ticks[0]) ** shift for value in x]
      else:
        x = [value + (ticks[-1] - ticks[0]) * shift for value in x]
      y = [row[score] for row in points]
      if bars == "std":
        below = above = [row[f"{score} std"] or 0.0 for row in points]
      else:
        below = [row[score] - row[f"{score} min"] for row in points]
        above = [row[f"{score} max"] - row[score] for row in points]
      axis.errorbar(
        x, y, (below, above), label=line, capsize=2, markersize=4,
        color=plot.colors.get(line.split(", ")[0], colors(number)),
        linewidth=1.2, marker=markers[number % len(markers)],
        linestyle="-" if is_number else "none",
      )  # fmt: skip
    if (guess := plot.chance.get(panel, plot.chance.get(None))) is not None:
      axis.axhline(guess, color="gray", linestyle=":", label="a guess")
    axis.set(title="" if panel is None else f"{plot.panel} {panel}")
    axis.grid(alpha=0.3)
    if is_log:
      axis.set_xscale("log", base=10 if plot.x == "learning_rate" else 2)
    if not is_number or (len(ticks) <= _MOST_TICKS and plot.x != "step"):
      axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks] if is_number else map(str, places))
    axis.minorticks_off()
    if not is_number and len(places) > 4:  # names would overlap
      axis.tick_params("x", rotation=45)
  for axis in axes.flat[len(panels) :]:
    axis.set_axis_off()
  meant = "least and largest seed" if bars == "range" else "standard deviation over the seeds"
  meant += "; dotted: a guess" if plot.chance else ""
  figure.supxlabel(f"{plot.x.replace('_', ' ')} (bars: {meant})", fontsize=10)
  figure.supylabel(f"{score}, nats per token" if score.endswith("loss") else score, fontsize=10)
  if title:
    found = [axis.get_legend_handles_labels() for axis in axes.flat]
    handles = {name: handle for of in found for handle, name in zip(*of, strict=True)}
    handles = {line: handles[line] for line in (*lines, "a guess") if line in handles}
    names, place = ", ".join(title), "outside right upper"
    figure.legend(handles.values(), handles, title=names, loc=place, frameon=False)
  picture = io.BytesIO()
  figure.savefig(picture, dpi=110, format=output.suffix.removeprefix("."))
  replace_file(output, picture.getvalue())
  plt.close(figure)

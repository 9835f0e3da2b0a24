"""Loss curves of one or several runs in one figure.

    lnssm-train plot runs/lnssm                                   # runs/lnssm/losses.png
    lnssm-train plot runs/lnssm runs/gla --output compared.png

One panel for the training loss and one per validation set, with a line per run. Run folders are
only read, also while their runs are in progress.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lnssm_jax.files.atomic import write_output
from lnssm_jax.files.checked_json import parse
from lnssm_jax.files.reading import open_regular
from train.runs.rows import wrong_row

Points = tuple[list[float], list[float]]  # steps, values
_NATS = "nats per token"


def read(run: Path) -> tuple[Points, dict[str, Points]]:
  """Reads training loss, and bits per byte of every validation set, by step.

  Where bits per byte are not known it has nats per token instead, as "SET, nats per token".
  `run` is a run folder or a copy of its metrics.jsonl. An incomplete last line is ignored.

  Raises:
    FileNotFoundError: there is no metrics.jsonl.
    ValueError: a line is not JSON or not a valid row.
  """
  file = run / "metrics.jsonl" if run.is_dir() else run
  if not file.is_file():
    raise FileNotFoundError(f"no metrics in {run}; use a run folder, such as runs/NAME.")
  with open_regular(file, follow_links=True) as opened:
    lines = opened.read().split(b"\n")[:-1]
  training: Points = ([], [])
  validation: dict[str, Points] = {}
  for number, line in enumerate(lines, 1):
    try:
      row = parse(line, strict=False)  # a loss may be NaN
    except ValueError as error:
      raise ValueError(f"line {number} of {file} is not JSON ({error}).") from error
    wrong = wrong_row(row)
    if wrong is not None:
      raise ValueError(f"line {number} of {file} is damaged ({wrong}).")
    if row.get("kind") == "train":
      points, value = training, row["loss"]
    elif row.get("kind") == "eval":
      bits = row.get("bits_per_byte")
      name = row["set"] if bits is not None else f"{row['set']}, {_NATS}"
      points = validation.setdefault(name, ([], []))
      value = row["val_loss"] if bits is None else bits
    else:
      continue
    points[0].append(row["step"])
    points[1].append(value)
  return training, validation


def smoothed(points: Points, width: int) -> tuple[np.ndarray, np.ndarray]:
  """Mean of the last `width` points, of fewer at the start, at the step of the last."""
  steps, values = (np.asarray(x, float) for x in points)
  sums = np.concatenate([[0.0], np.cumsum(values)])
  ends = np.arange(1, len(sums))
  starts = np.maximum(0, ends - max(1, width))
  return steps, (sums[ends] - sums[starts]) / (ends - starts)


def _labels(runs: Sequence[Path]) -> list[str]:
  """Names of the runs, or their paths if two have the same name."""
  names = [run.name if run.is_dir() else run.stem for run in runs]
  return names if len(set(names)) == len(names) else [str(run) for run in runs]


def draw(runs: Sequence[Path], output: Path | None = None) -> Path:
  """Writes the figure in the format of the suffix of `output`, and returns its path.

  Without `output`, losses.png: in the folder of a single run, else in the current one.

  Raises:
    ValueError: a file is damaged, or `output` cannot be written.
    FileNotFoundError: a run has no metrics.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt
  from matplotlib import ticker
  from matplotlib.backend_bases import FigureCanvasBase

  if output is None:
    output = (runs[0] if len(runs) == 1 and runs[0].is_dir() else Path()) / "losses.png"
  formats = FigureCanvasBase.get_supported_filetypes()
  if output.suffix[1:].lower() not in formats or not output.absolute().parent.is_dir():
    ends = ", ".join(f".{name}" for name in formats)
    raise ValueError(f"{output} must be in a folder that exists, and end in one of {ends}.")
  curves = dict(zip(_labels(runs), (read(run) for run in runs), strict=True))
  sets = list(dict.fromkeys(name for _, validation in curves.values() for name in validation))
  columns = min(3, 1 + len(sets))
  rows = -(-(1 + len(sets)) // columns)
  size = (4.4 * columns, 3.3 * rows)
  figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
  panels = dict(zip(["training", *sets], axes.flat, strict=False))
  for number, (name, (training, validation)) in enumerate(curves.items()):
    # One color per run in all panels, which need not have all runs; of colors there are ten.
    dashes = ("-", "--", ":", "-.")[number // 10 % 4]
    style = {"label": name, "linestyle": dashes, "linewidth": 1, "color": f"C{number}"}
    panels["training"].plot(*smoothed(training, len(training[0]) // 40), **style)
    for each, points in validation.items():
      panels[each].plot(*points, marker=".", markersize=3, **style)
  for name, axis in panels.items():
    # The first steps have large losses, which would compress the rest of a linear axis.
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
    axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%.4g"))
    axis.yaxis.set_minor_locator(ticker.NullLocator())
    label = _NATS if name == "training" or name.endswith(_NATS) else "bits per byte"
    axis.set(title=name, xlabel="step", ylabel=label)
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=7)
  for axis in axes.flat[len(panels) :]:
    axis.set_axis_off()
  drawn = io.BytesIO()
  figure.savefig(drawn, dpi=110, format=output.suffix[1:].lower())
  plt.close(figure)
  write_output(output, drawn.getvalue())
  return output

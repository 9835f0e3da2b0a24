"""Results over seeds: mean, standard deviation, least and largest value, and their pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from train.sweeps import Plot, plots, tables

Row = dict[str, Any]


def summary(rows: Sequence[Row], names: Sequence[str], value: str) -> list[Row]:
  """A row per combination of `names`, of the rows that have a value (`tables.spread`)."""
  groups: dict[tuple, list[float]] = {}
  for row in rows:
    if row[value] != "":
      groups.setdefault(tuple(row[name] for name in names), []).append(float(row[value]))
  return [
    dict(zip(names, key, strict=True)) | tables.spread("value", values) | {"seeds": len(values)}
    for key, values in groups.items()
  ]


def text(row: Row) -> str:
  """Mean ± standard deviation."""
  std = row["value std"]
  return f"{row['value']:.3f}" + ("" if std is None else f" ± {std:.3f}")


def draw(
  rows: Sequence[Row],
  plot: Plot,
  score: str,
  output: Path,
  bars: Literal["range", "std"] = "std",
  share_y: bool = True,
) -> None:
  """Draws rows of `summary` as `plots.draw` does, the mixers of all pictures in one order."""
  axes = [name for name in (plot.x, plot.line, plot.panel) if name]
  points = [
    {name: row[name] for name in axes}
    | {"parameters": row["parameters"], "best": True}
    | {name.replace("value", score): row[name] for name in row if name.startswith("value")}
    for row in sorted(rows, key=lambda row: row["mixer"])
  ]
  plots.draw(points, plot, score, output, bars=bars, share_y=share_y)

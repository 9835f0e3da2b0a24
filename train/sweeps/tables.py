"""The tables of a sweep: mean and spread over seeds, as JSON lines, CSV and Markdown."""

import csv
import functools
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lnssm_jax.files.atomic import replace_files
from lnssm_jax.files.printable import printable
from lnssm_jax.models import count_parameters
from train import config
from train.runs.run_folder import RunFolder
from train.step.model import build_model
from train.sweeps.spec import Run, primary, rate_of
from train.sweeps.work import Scores

Row = dict[str, Any]


def run_rows(
  runs: Sequence[Run], scores: Sequence[Scores | None], tuning_seed: int | None = None
) -> list[Row]:
  """A row per run; `finished` says whether it has scores, and a score of None that it diverged.

  `use` says of which runs the result is: not of those of `tuning_seed`, which choose the rate.
  """
  return [
    {
      **run.labels,
      "parameters": parameters(run.cfg.model),
      "learning_rate": rate_of(run),
      "seed": run.cfg.seed,
      "use": "tuning" if run.cfg.seed == tuning_seed else "result",
      "finished": known is not None,
      **(known or {}),
      "run_dir": run.cfg.run_dir,
    }
    for run, known in zip(runs, scores, strict=True)
  ]


def table(
  runs: Sequence[Run], scores: Sequence[Scores | None], tuning_seed: int | None = None
) -> list[Row]:
  """A row per combination of labels and learning rate, over seeds.

  Not over `tuning_seed`, which chose the rate, where others are finished.

  Each score has its mean, standard deviation (of a sample, None for one seed), least and largest
  value. `best` marks the learning rate with the best mean of the first score, the accuracy of
  recall or the first validation loss, among those of the same labels with most seeds, if they are
  all finished and none diverged.
  """
  of_rate: dict[tuple, list[tuple[Run, Scores | None]]] = {}
  for run, known in zip(runs, scores, strict=True):
    of_rate.setdefault((*run.labels.items(), rate_of(run)), []).append((run, known))
  rows: dict[tuple, list[Row]] = {}
  for (*labels, _), members in of_rate.items():
    others = [member for member in members if member[0].cfg.seed != tuning_seed]
    if any(known is not None for _, known in others):
      members = others
    rows.setdefault(tuple(labels), []).append(_row(members))
  name, sign = primary(runs[0])
  for same in rows.values():
    most = max(row["runs"] for row in same)
    whole = [row for row in same if row["seeds"] == most and not row["diverged"]]
    best = max(whole, key=lambda row: sign * row[name], default=None)
    for row in same:
      row["best"] = row is best
  return [row for same in rows.values() for row in same]


@functools.cache
def _count(model: str) -> int:
  settings = config.Model(**json.loads(model))
  shapes = jax.eval_shape(functools.partial(build_model, settings), jax.random.key(0))
  return count_parameters(shapes)


def parameters(model: config.Model) -> int:
  """Number of parameters of a model; initializes none."""
  return _count(json.dumps(config.to_dict(model)))


def write(
  folder: Path,
  runs: Sequence[Run],
  scores: Sequence[Scores | None],
  tuning_seed: int | None = None,
) -> list[Row]:
  """Writes the tables of runs and of rates, and the curves, into `folder`; returns those of rates.

  All files are on disk before the first of them is replaced, each as a whole, since other processes
  may write them at the same time: on a full disk all old ones stay.

  Raises:
    OSError: a file cannot be written; it is named.
  """
  rows = table(runs, scores, tuning_seed)
  lines = lambda of: "".join(json.dumps(row) + "\n" for row in of)
  of_runs = run_rows(runs, scores, tuning_seed)
  files = {"runs.jsonl": lines(of_runs), "table.jsonl": lines(rows)}
  files |= {"runs.csv": _csv(of_runs), "table.csv": _csv(rows), "table.md": markdown(runs, rows)}
  files["curves.csv"] = _csv(curves(runs, rows, tuning_seed))
  replace_files({folder / name: content.encode() for name, content in files.items()})
  return rows


def curve_score(run: Run) -> str:
  """The name of what a learning curve shows."""
  return "loss" if run.task is None else run.task.score


def curves(runs: Sequence[Run], rows: Sequence[Row], tuning_seed: int | None = None) -> list[Row]:
  """The learning curves at the best rates: what the runs wrote on the way, over seeds, by step.

  That is the accuracy of a task, or the loss of training.
  """
  name, kind = curve_score(runs[0]), "train" if runs[0].task is None else "task"
  best = [(row["learning_rate"], [*row.items()]) for row in rows if row["best"]]
  found: dict[tuple, list[float]] = {}
  parts: dict[tuple, Run] = {}
  for run in runs:
    is_best = any(rate == rate_of(run) and set(run.labels.items()) <= set(of) for rate, of in best)
    if not is_best or run.cfg.seed == tuning_seed:
      continue
    labels = tuple(run.labels.items())
    parts[labels] = run
    for row in RunFolder(run.cfg.run_dir).read_rows():
      if row["kind"] == kind and row.get(name) is not None:
        found.setdefault((labels, row["step"]), []).append(row[name])
  return [
    {
      **dict(labels),
      "parameters": parameters(parts[labels].cfg.model),
      "step": step,
      "best": True,
      **spread(name, values),
    }
    for (labels, step), values in found.items()
  ]


def _csv(rows: Sequence[Row]) -> str:
  """Rows as CSV."""
  text = io.StringIO()
  writer = csv.DictWriter(text, columns(rows), lineterminator="\n")
  writer.writerow({name: _cell_of_csv(name) for name in columns(rows)})
  writer.writerows([{name: _cell_of_csv(value) for name, value in row.items()} for row in rows])
  return text.getvalue()


def _cell_of_csv(value: Any) -> Any:
  """A value for a cell; text that a spreadsheet would run as a formula gets an apostrophe."""
  if isinstance(value, str):
    value = printable(value)
    return f"'{value}" if value.lstrip().startswith(("=", "+", "-", "@")) else value
  return value


def spread(name: str, values: Sequence[float]) -> Row:
  """Mean, standard deviation (of a sample, None for one value), least and largest value, by name.

  The mean has the name alone.
  """
  return {
    name: float(np.mean(values)),
    f"{name} std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
    f"{name} min": min(values),
    f"{name} max": max(values),
  }


def columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """All keys of the rows, in the order of their first occurrence."""
  return list(dict.fromkeys(name for row in rows for name in row))


def markdown(runs: Sequence[Run], rows: Sequence[Row]) -> str:
  """The best learning rate for each combination of labels: mean and deviation of each score."""
  labels = list(dict.fromkeys(name for run in runs for name in run.labels))
  kept = [row for row in rows if row["best"]]
  names = [name for name in columns(kept) if f"{name} std" in columns(kept)]
  head = [*labels, "parameters", "learning rate", *names, "seeds"]
  lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
  for row in kept:
    cells = [str(row.get(name, "")) for name in labels]
    cells += [f"{row['parameters']:,}", f"{row['learning_rate']:.3g}"]
    cells += [_cell(row, name) for name in names]
    lines.append("| " + " | ".join([*cells, str(row["seeds"])]) + " |")
  total = sum(row["runs"] for row in rows)
  missing = total - sum(row["seeds"] for row in rows)
  diverged = sum(row["diverged"] for row in rows)
  notes = [f"{missing} of {total} runs of this table are not finished."] if missing else []
  notes += [f"{diverged} runs diverged; their learning rates are left out."] if diverged else []
  return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def _cell(row: Row, name: str) -> str:
  mean, deviation = row.get(name), row.get(f"{name} std")
  if mean is None:
    return ""
  digits = 0 if abs(mean) >= 100 or isinstance(row[f"{name} min"], int) else 4  # int: of steps
  return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def _row(members: Sequence[tuple[Run, Scores | None]]) -> Row:
  """The row of the seeds of a learning rate."""
  run = members[0][0]
  known = [scores for _, scores in members if scores is not None]
  row: Row = {**run.labels, "parameters": parameters(run.cfg.model)}
  row |= {"learning_rate": rate_of(run), "runs": len(members), "seeds": len(known)}
  row["diverged"] = sum(any(x is None for x in scores.values()) for scores in known)
  for name in columns(known):
    values = [x for scores in known if (x := scores.get(name)) is not None and math.isfinite(x)]
    if values:
      row |= spread(name, values)
  return row

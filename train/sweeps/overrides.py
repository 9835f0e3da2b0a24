"""Whether `--set` of a sweep leaves its axes alone."""

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from train import config
from train.config import ConfigError
from train.config.checked import check

if TYPE_CHECKING:
  from train.sweeps.spec import Run

_OF_RUNS = ("optimizer.peak_lr", "seed", "run_dir")  # every run has its own


def check_axes(changes: Sequence[str], runs: Sequence["Run"]) -> None:
  """Raises ConfigError if a change is of a label, or its value, in which the runs differ."""
  if not changes:
    return
  plain = [_plain(run) for run in runs]
  for change in changes:
    path = change.partition("=")[0].strip()
    values = [_at(path, of_run) for of_run in plain]
    is_group = isinstance(values[0], dict)  # whose own error names its settings
    for label in dict.fromkeys(name for run in runs for name in run.labels):
      of_label = [run.labels.get(label) for run in runs]
      is_axis = of_label == values or (path == label and not is_group)
      check(
        not is_axis or of_label.count(of_label[0]) == len(runs),
        f"--set {change}: {path} is the axis {label} of the sweep; choose by --only {label}=..., or"
        " in the file.",
      )
    check(path not in _OF_RUNS, f"--set {change}: every run of a sweep has its own {path}.")


def check_different(
  changes: Sequence[str], before: Sequence["Run"], after: Sequence["Run"]
) -> None:
  """Raises ConfigError if changes make two of the runs the same."""
  if not changes:
    return
  old, new = [_plain(run) for run in before], [_plain(run) for run in after]
  for number, settings in enumerate(new):
    first = new.index(settings)
    if first == number or old[first] == old[number]:
      continue
    one, other = before[first], before[number]
    by = [name for name, value in one.labels.items() if other.labels.get(name) != value]
    names = [
      reprlib.repr({name: run.labels.get(name) for name in by}) if by else run.cfg.run_dir
      for run in (one, other)
    ]
    raise ConfigError(
      f"--set {', '.join(changes)} makes the runs {' and '.join(names)} the same, so it sets an"
      f" axis; choose {f'by --only {by[0]}=..., or ' if by else ''}in the file."
    )


def _plain(run: "Run") -> dict[str, Any]:
  """All that a run computes, as simple values."""
  task = run.task and config.to_dict(run.task)
  return config.to_dict(run.cfg) | {"run_dir": None, "run_name": None, "task": task}


def _at(path: str, values: Any) -> Any:
  """The value at a dotted path of nested dictionaries; None if there is none."""
  for name in path.split("."):
    values = values.get(name) if isinstance(values, dict) else None
  return values

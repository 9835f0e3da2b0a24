"""The runs of a sweep: a grid of configs, and the files that have them."""

import dataclasses
import itertools
import reprlib
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from train import config
from train.config import ConfigError, apply_overrides
from train.config.checked import at_least, check, coerce, did_you_mean, settings
from train.config.loading import executed
from train.sweeps.work import Work

Label = str | int | float
_OF_RUNS = ("optimizer.peak_lr", "seed", "run_dir")  # every run has its own


class Task:
  """Data that the runs of a sweep learn in place of text: a subclass made by `settings`.

  Its fields are the settings of `--set task.NAME=VALUE`, and part of what a run is.

  Attributes:
    score: name of the score that is compared.
    sign: 1 if more of it is better, -1 if less.
  """

  score: ClassVar[str]
  sign: ClassVar[int]

  def check(self, cfg: config.Train) -> None:
    """Raises ValueError if the task does not fit the settings of a run."""
    raise NotImplementedError

  def targets(self, cfg: config.Train) -> int:
    """Number of tokens of a row that the loss counts."""
    raise NotImplementedError

  def batch(self, cfg: config.Train) -> dict[str, Any]:
    """A batch, as `train.step.copies.Copies.step` takes it."""
    raise NotImplementedError

  def work(self, runs: Sequence["Run"], kernels: Path) -> Work:
    """Copies that will learn the task: runs that differ in seed, learning rate and folder only."""
    raise NotImplementedError


@settings
class Run:
  """One training run of a sweep.

  Attributes:
    cfg: its settings; `run_dir` is relative to the sweep's folder.
    labels: columns of the tables that say which run it is, other than learning rate and seed.
    task: a `Task`, or None for a language model.
  """

  cfg: config.Train
  labels: dict[str, Any] = dataclasses.field(default_factory=dict)
  task: Any = None

  def __post_init__(self):
    check(
      self.task is None or isinstance(self.task, Task),
      f"task={self.task!r} of {self.cfg.run_dir} must be a train.sweeps.Task, or None for text.",
    )


@settings
class Plot:
  """Axes of a sweep's plot, as labels: a line per `line`, a panel per `panel`.

  `where` has the values of labels of which only these are drawn, and `chance` the score of a guess
  by the panel's value, by None that of all others. `colors` has those of lines, by the first
  label of a line's name.
  """

  x: str = "learning_rate"
  line: str | None = None
  panel: str | None = None
  where: dict[str, Any] = dataclasses.field(default_factory=dict)
  chance: dict[Any, float] = dataclasses.field(default_factory=dict)
  colors: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
  """A sweep, ready to run.

  Attributes:
    folder: of the runs, whose `run_dir` is inside it, and of the tables.
    runs: all runs, of which tables are made.
    chosen: those that are trained.
    copies: most runs to train together; None: all that have one program.
    tuning_seed: its runs choose the learning rate, at which alone the other seeds train; None: all
      seeds train at all learning rates.
    first_rates: of the tuning seed, which tries a further rate of the runs while the best so far is
      the least or the largest tried; None: it tries all.
  """

  folder: Path
  runs: Sequence[Run]
  chosen: Sequence[Run]
  plot: Plot
  copies: int | None = None
  tuning_seed: int | None = None
  first_rates: Sequence[float] | None = None


Made = config.Train | tuple[config.Train, Task] | None


def grid(
  make: config.Train | Callable[..., Made],
  axes: Mapping[str, Iterable[Label]],
  *,
  learning_rates: Sequence[float] | None = None,
  seeds: Sequence[int] = (0,),
  task: Task | None = None,
  folder: str | None = None,
) -> list[Run]:
  """The runs of all combinations of the values of `axes`, learning rates and seeds.

  Args:
    make: a function from the values of the axes, by name, to a config, or a config and a task, or
      None for a combination that is left out; or a config whose settings the axes name, such as
      {"model.mixer": ("gla", "lnssm")}.
    learning_rates: peaks; `final_lr` is scaled alike. None: the config's own.
    folder: template of `run_dir`: "{model}-{width}-{lr:g}-{seed}" with the axes' names, `lr`,
      `seed`, and settings, such as {model.dim}. By default all axes, the rate and the seed.

  Raises:
    ConfigError: settings are wrong, or values are no sequence, or none.
  """
  axes = {name: _listed(f"axis {name!r}", values) for name, values in axes.items()}
  seeds = _listed("seeds", seeds, ", or range(N) for N of them")
  if learning_rates is not None:
    learning_rates = _listed("learning_rates", learning_rates)
  runs = []
  for values in itertools.product(*axes.values()):
    labels = dict(zip(axes, values, strict=True))
    made = make(**labels) if callable(make) else _changed(make, labels)
    cfg, own = made if isinstance(made, tuple) else (made, None)
    if cfg is None:
      continue
    check(isinstance(cfg, config.Train), f"the sweep's function made {cfg!r}, not a config.Train.")
    for rate, seed in itertools.product(learning_rates or (cfg.optimizer.peak_lr,), seeds):
      ratio = cfg.optimizer.final_lr / cfg.optimizer.peak_lr
      optimizer = dataclasses.replace(cfg.optimizer, peak_lr=rate, final_lr=rate * ratio)
      place = _folder(folder, cfg, labels, rate, seed)
      one = dataclasses.replace(cfg, optimizer=optimizer, seed=seed, run_dir=place)
      runs.append(Run(cfg=one, labels=labels, task=own or task))
  return runs


def load(
  path: str | Path,
  *,
  folder: str | Path | None = None,
  changes: Sequence[str] = (),
  only: Sequence[str] = (),
) -> Sweep:
  """Loads the sweep of a Python file: `SWEEP`, a list of runs or configs, and other settings.

  These are `PLOT`, `COPIES`, `TUNING_SEED` and `FIRST_RATES`, the fields of `Sweep`.

  Args:
    folder: where its runs are written; by default runs/ and the file's name.
    changes: settings of all runs, as of `--set`; `task.` begins those of the task.
    only: chooses runs by label, "width=64,128", learning rate "lr=1e-3" or "seed=0".

  Raises:
    FileNotFoundError: there is no such file.
    ConfigError: it has no `SWEEP`, settings are wrong, two runs have the same folder, `only` leaves
      no run, the rows of a chosen run's task do not fit its config, or `PLOT` names no label.
  """
  path = Path(path)
  with executed(path) as names:
    found, plot = names.get("SWEEP", ()), names.get("PLOT", Plot())
    copies, tuning_seed = (
      coerce(names.get(name), int | None, f"{path}: {name}") for name in ("COPIES", "TUNING_SEED")
    )
    first_rates = coerce(names.get("FIRST_RATES"), tuple[float, ...] | None, f"{path}: FIRST_RATES")
    check(
      isinstance(found, list),
      f"{path} has no list SWEEP of configs; use SWEEP = train.sweeps.grid(...).",
    )
    check(found != [], f"SWEEP of {path} has no run; a grid has none if all that it makes is None.")
  if copies is not None:
    at_least(f"{path}: COPIES", copies, 1)
  found = [Run(cfg=x) if isinstance(x, config.Train) else x for x in found]
  for x in found:
    check(isinstance(x, Run), f"SWEEP of {path} holds {x!r}, not a config.Train or a Run.")
  folder = Path(folder or Path("runs") / path.stem)
  before = found
  for choice in only:
    before = _chosen(before, choice)
  _check_axes(changes, before)
  runs = [_prepared(run, folder, changes) for run in found]
  prepared = dict(zip(map(id, found), runs, strict=True))
  chosen = [prepared[id(run)] for run in before]
  _check_different(changes, before, chosen)
  _check_tasks(chosen)
  _check_plot(path, plot, runs)
  places = [run.cfg.run_dir for run in runs]
  twice = next((place for place in places if places.count(place) > 1), None)
  check(twice is None, f"two runs of {path} have the folder {twice!r}; its template lacks an axis.")
  seeds = list(dict.fromkeys(run.cfg.seed for run in runs))
  check(
    tuning_seed is None or tuning_seed in seeds,
    f"TUNING_SEED = {tuning_seed} of {path} must be one of the seeds of its runs, {seeds}.",
  )
  for labels in {tuple(run.labels.items()) for run in runs}:
    rates = {rate_of(run) for run in runs if tuple(run.labels.items()) == labels}
    check(
      first_rates is None or (tuning_seed is not None and bool(rates & set(first_rates))),
      f"FIRST_RATES = {first_rates} of {path} needs a TUNING_SEED, and one of the learning rates of"
      f" its runs, {sorted(rates)}.",
    )
  settings: dict[str, Any] = {"plot": plot, "copies": copies, "tuning_seed": tuning_seed}
  settings["first_rates"] = first_rates
  return Sweep(folder=folder, runs=runs, chosen=chosen, **settings)


def rate_of(run: Run) -> float:
  """The peak learning rate of a run."""
  return run.cfg.optimizer.peak_lr


def primary(run: Run) -> tuple[str, int]:
  """Name of the score that is compared, and 1 if more is better, else -1."""
  if run.task is not None:
    return run.task.score, run.task.sign
  return f"{run.cfg.data.validation[0]} loss", -1


def _listed(name: str, values: Any, more: str = "") -> list[Any]:
  """The values of an axis; `more` adds a fix to that of a sequence of one."""
  check(
    isinstance(values, Iterable) and not isinstance(values, str),
    f"grid: {name}={values!r} must be a sequence of values; use ({values!r},){more}.",
  )
  values = list(values)
  check(values != [], f"grid: {name} has no values, so there is no run; give it at least one.")
  return values


def _check_tasks(runs: Sequence[Run]) -> None:
  """Raises ConfigError if the rows of a run's task do not fit its settings or its model."""
  from train.step.model import check_length  # imports JAX

  seen = []
  for run in runs:
    if run.task is None:
      continue
    try:
      run.task.check(run.cfg)
    except ValueError as error:
      place = f"task of {run.cfg.run_dir} (its length is seq_len)"
      raise ConfigError(f"{place}: {error}") from error
    if (built := (run.cfg.model, run.cfg.seq_len)) in seen:
      continue
    seen.append(built)
    try:
      check_length(run.cfg.model, "seq_len", run.cfg.seq_len)
    except ValueError as error:
      raise ConfigError(f"{run.cfg.run_dir}: {error}") from error


def _check_plot(path: Path, plot: Any, runs: Sequence[Run]) -> None:
  """Raises ConfigError unless a plot is one, of labels that runs have."""
  check(isinstance(plot, Plot), f"PLOT of {path} is {plot!r}; use train.sweeps.Plot(x=...).")
  labels = dict.fromkeys(name for run in runs for name in run.labels)
  known = [*labels, "learning_rate", "parameters"]
  for name in (plot.x, plot.line, plot.panel, *plot.where):
    check(
      name is None or name in known,
      f"PLOT of {path} has {name!r}, which is no label of its runs{did_you_mean(str(name), known)}",
    )


def _changed(cfg: config.Train, values: Mapping[str, Any]) -> config.Train:
  """`cfg` with settings by path."""
  plain = config.to_dict(cfg)
  for path, value in values.items():
    *groups, leaf = path.split(".")
    inside: Any = plain
    for group in groups:
      inside = inside.get(group)
      check(isinstance(inside, dict), f"the axis {path!r} of the sweep names no setting.")
    inside[leaf] = value
  return config.from_dict(plain)


def _folder(
  template: str | None, cfg: config.Train, labels: Mapping[str, Label], rate: float, seed: int
) -> str:
  if template is None:
    return "-".join([*map(str, labels.values()), f"lr{rate:g}", f"seed{seed}"])
  plain = {name: value for name, value in labels.items() if "." not in name}
  names = vars(cfg) | {"lr": rate, "seed": seed} | plain
  try:
    return string.Formatter().vformat(template, (), names)
  except (KeyError, AttributeError, IndexError, ValueError) as error:
    raise ConfigError(
      f"the template folder={template!r} of the sweep cannot be filled in ({error}); it may have"
      f" {', '.join([*plain, 'lr', 'seed'])}, and settings such as {{model.dim}}."
    ) from error


def _chosen(runs: Sequence[Run], choice: str) -> list[Run]:
  """The runs that have one of the values of "label=a,b"."""
  label, _, text = choice.partition("=")
  known = list(dict.fromkeys(name for run in runs for name in (*run.labels, "lr", "seed")))
  check(
    label in known,
    f"--only {choice!r} wants label=value,..., and the sweep has no such label"
    f"{did_you_mean(label, known)}",
  )
  shown = f"{{:{'g' if label == 'lr' else ''}}}".format
  values = [_values(run) for run in runs]
  wanted = [shown(float(x)) if label == "lr" else x for x in text.split(",")]
  kept = [
    run for run, of in zip(runs, values, strict=True) if label in of and shown(of[label]) in wanted
  ]
  has = ", ".join(dict.fromkeys(shown(of[label]) for of in values if label in of))
  check(bool(kept), f"--only {choice!r} leaves no run; {label} is one of {has}.")
  return kept


def _values(run: Run) -> dict[str, Label]:
  return {**run.labels, "lr": rate_of(run), "seed": run.cfg.seed}


def _prepared(run: Run, folder: Path, changes: Sequence[str]) -> Run:
  """`run` with its changes, in its folder."""
  of_task = [x.removeprefix("task.") for x in changes if x.startswith("task.")]
  of_cfg = [x for x in changes if not x.startswith("task.")]
  cfg, task = apply_overrides(run.cfg, of_cfg) if of_cfg else run.cfg, run.task
  if of_task:
    check(task is not None, f"--set task.{of_task[0]}: {run.cfg.run_dir} has no task.")
    task = apply_overrides(task, of_task)
  check(
    task is not None or len(cfg.data.validation) > 0,
    "data.validation is empty: a run without a task is compared by its validation loss; name sets.",
  )
  cfg = dataclasses.replace(cfg, run_dir=str(folder / cfg.run_dir))
  return dataclasses.replace(run, cfg=cfg, task=task)


def _check_axes(changes: Sequence[str], runs: Sequence[Run]) -> None:
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


def _check_different(changes: Sequence[str], before: Sequence[Run], after: Sequence[Run]) -> None:
  """Raises ConfigError if changes make two of the runs the same."""
  if not changes:
    return
  old, new = [_plain(run) for run in before], [_plain(run) for run in after]
  for number, values in enumerate(new):
    first = new.index(values)
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


def _plain(run: Run) -> dict[str, Any]:
  """All that a run computes, as simple values."""
  task = run.task and config.to_dict(run.task)
  return config.to_dict(run.cfg) | {"run_dir": None, "run_name": None, "task": task}


def _at(path: str, values: Any) -> Any:
  """The value at a dotted path of nested dictionaries; None if there is none."""
  for name in path.split("."):
    values = values.get(name) if isinstance(values, dict) else None
  return values

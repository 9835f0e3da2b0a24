"""The folder of a run: config.json, metrics.jsonl, checkpoints/, and a lock against other runs.

Also programs/, compiled programs, and on a GPU kernels/, the compiler's autotuning results: a
restart takes seconds and computes the same bits.
"""

import contextlib
import json
import secrets
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from lnssm_jax.files import buckets
from lnssm_jax.files.atomic import make_folder, replace_file
from lnssm_jax.files.printable import shell_word
from lnssm_jax.files.reading import FORMAT
from train import config
from train.checkpoint import digests, store
from train.cluster import distributed
from train.config.changes import differences, is_free
from train.config.versions import versions
from train.loop import Callback, Moment
from train.messages import Say, warn
from train.runs import bucket
from train.runs.config_file import CONFIG, RunFolderError, read, read_config
from train.runs.metrics_file import MetricsFile
from train.runs.rows import Row
from train.runs.run_lock import LockedError, RunLock
from train.step.optimizer import make_schedule


class Settings(Protocol):
  """The settings of a program that trains: a dataclass of `train.config.checked.settings`."""

  @property
  def run_dir(self) -> str:
    """Folder that the run writes into."""
    ...

  @property
  def optimizer(self) -> config.Optimizer:
    """With the average of the parameters, if any."""
    ...


class InUseError(RunFolderError):
  """Another process trains in the folder; the message says which."""


class RunFolder(Callback):
  """The files of one run. With several processes, only process 0 writes them.

  As a callback it ends a run whose folder another process has taken over.
  """

  def __init__(self, path: str | Path):
    self.path = Path(path)
    if buckets.is_bucket(path):
      self.path = Path(distributed.on_first(lambda: str(bucket.fetched(path))))
    self.config_file = self.path / CONFIG
    self.metrics_file = self.path / "metrics.jsonl"
    self.checkpoints = self.path / "checkpoints"
    self.kernels = self.path / "kernels"
    self.changes: dict[str, str] = {}  # of settings since the last start of the run
    self.on_rows: Callable[[list[Row]], object] = lambda rows: None  # called in process 0
    self.say: Say = warn
    self._id: str | None = None  # known after `write_config`
    self._config = b""  # likewise
    self._lock: RunLock | None = None
    own = lambda: self._id or digests.run_id(self.path)
    self._metrics = MetricsFile(self.metrics_file, own)

  def __enter__(self) -> "RunFolder":
    return self

  def __exit__(self, *_) -> None:
    if self._lock is not None:
      if lost := self._metrics.close():
        self.say(f"{lost} rows could not be written to {self.metrics_file} and are lost")
      self._lock.close()
      self._lock = None

  def before_step(self, now: Moment) -> None:
    self.check()

  def check(self) -> None:
    """Raises InUseError if another process has taken over the folder."""
    if self._lock is not None:
      try:
        self._lock.check()
      except LockedError as error:
        raise InUseError(str(error)) from None

  def load_config(self) -> config.Train:
    """Reads the config of the run.

    Raises:
      RunFolderError: config.json is missing or unreadable.
    """
    return read_config(self.path)

  def write_config(self, cfg: Settings) -> None:
    """Writes config.json: the config, the versions of the code, and the id of the run."""
    if not distributed.is_first():
      return
    self._id = digests.run_id(self.path) or secrets.token_hex(8)
    values = config.to_dict(cfg) | {"format": FORMAT, "versions": versions(), "run": self._id}
    self._config = f"{json.dumps(values, indent=2)}\n".encode()
    replace_file(self.config_file, self._config)

  def before_checkpoint(self) -> None:
    """Makes durable what a checkpoint needs: the rows before it, and config.json.

    If someone removed or renamed the run folder, it is created again.

    Raises:
      OSError: it cannot be written.
    """
    if self._config and not self.config_file.exists():
      self.say(
        f"{self.config_file} has vanished: the folder was removed or renamed. It is created again, "
        "and the run continues there; what it had before is not in it."
      )
      make_folder(self.path)
      replace_file(self.config_file, self._config)
    self._metrics.sync()

  def read_rows(self) -> list[Row]:
    """Reads the rows of metrics.jsonl, without a last line that a crash cut off.

    Raises:
      RunFolderError: any other line is damaged, or of another run.
    """
    return self._metrics.read()

  def append(self, rows: list[Row]) -> list[Row]:
    """Appends rows to metrics.jsonl, all or none, and returns them.

    Rows that do not fit on the disk are kept in memory and written with the next call. At the end
    of the run those that could never be written are counted in a message.
    """
    if distributed.is_first():
      self.on_rows(rows)
      self._metrics.append(rows)
    return rows

  def keep_rows_until(self, step: int, count: int | None = None) -> list[Row]:
    """Removes the rows of later steps, which will be trained again, from metrics.jsonl.

    Damaged lines are put aside into metrics.jsonl.damaged. Other processes only read.

    Args:
      count: `row_count` when the checkpoint of `step` was saved; fewer rows are reported.
    """
    if distributed.is_first():
      return self._metrics.keep_until(step, self.say, count)
    return []

  def row_count(self) -> int:
    """Rows of metrics.jsonl, in process 0, which writes them and the metadata of checkpoints."""
    return self._metrics.count

  def skipped_steps(self) -> dict[int, str]:
    """Steps skipped by the step guard (`train.step.step_guard`), in ascending order, and why."""
    skipped = lambda row: row["kind"] == "skipped"
    rows = distributed.on_first(lambda: list(filter(skipped, self._metrics.notable())))
    return {row["step"]: str(row.get("why")) for row in rows}

  def _result(self) -> Row | None:
    """The last result of a sweep."""
    return next((row for row in reversed(self.read_rows()) if row["kind"] == "result"), None)

  def check_not_of_a_sweep(self) -> None:
    """Raises FileNotFoundError if this is a finished run of a sweep, which has no state."""
    if store.newest_step(self.checkpoints) is None and self.metrics_file.exists():
      with contextlib.suppress(RunFolderError):  # damaged lines are put aside later
        if self._result() is not None:
          raise self.without_checkpoint()

  def without_checkpoint(self) -> FileNotFoundError:
    """The error for a run that has no checkpoint, from which it cannot be loaded."""
    none, result = f"no checkpoint in {self.checkpoints}", self._result()
    if result is None:
      return FileNotFoundError(f"{none}; train first: lnssm-train fit --config FILE")
    fix = f"its scores are in {self.metrics_file}."
    if result.get("task") is None:
      fix = f"lnssm-train fit --run-dir {shell_word(self.path)} --set run_dir=ANOTHER"
      fix = f"train one that has them: {fix}"
    return FileNotFoundError(f"{none}: runs of a sweep keep no parameters; {fix}")

  def evaluations(self) -> list[Row]:
    """Rows of all evaluations."""
    is_one = lambda row: row["kind"] == "eval"
    return distributed.on_first(lambda: list(filter(is_one, self._metrics.notable())))

  def evaluation(self, step: int, sets: Iterable[str]) -> list[Row]:
    """Rows of the evaluation at `step` if it covered all `sets`, else an empty list."""
    return of_step(self.evaluations(), step, sets)


def of_step(evaluations: Iterable[Row], step: int, sets: Iterable[str]) -> list[Row]:
  """Rows of the evaluation at `step` if it covered all `sets`, else an empty list."""
  rows = {row["set"]: row for row in evaluations if row["step"] == step}
  return [rows[name] for name in sets] if rows.keys() >= set(sets) else []


def claim(cfg: Settings, *, allow_config_change: bool = False, say: Say = warn) -> RunFolder:
  """Locks `cfg.run_dir` for training by this process alone (`train.runs.run_lock`).

  Args:
    say: reports what happens to the folder, until the run ends.

  Raises:
    InUseError: another process trains in it.
    RunFolderError: it is a file, not writable, or belongs to another config.
  """
  run = RunFolder(cfg.run_dir)
  run.say = say
  run.changes = distributed.on_first(lambda: _claim(run, cfg, allow_config_change))
  return run


def _claim(run: RunFolder, cfg: Settings, allow_config_change: bool) -> dict[str, str]:
  """Locks the folder; returns the settings that differ from those of its run."""
  _check_writable(run.path)
  try:
    run._lock = RunLock(run.path, run.say)
  except LockedError as error:
    raise InUseError(str(error)) from None
  except OSError as error:
    raise _not_writable(run.path, error) from error
  try:
    changes = {}
    if store.newest_step(run.checkpoints) is not None:  # otherwise there is nothing to protect
      before = read(run.path, type(cfg))
      changes = differences(before, cfg)
      rejected = {name: line for name, line in changes.items() if not is_free(name)}
      if before.optimizer.ema_decay is None:  # an average may begin at any step
        rejected.pop("optimizer.ema_decay", None)
      if rejected and not allow_config_change:
        raise RunFolderError(
          f"{run.path} belongs to a run with other settings, by its config.json:",
          *(f"  {line}" for line in rejected.values()),
          "Restore them to resume that run, start a new one with --set run_dir=ANOTHER, or resume "
          "with these settings by --allow-config-change.",
        )
      same_schedule = not any(name.startswith("optimizer.") for name in changes)
      if isinstance(cfg, config.Train) and "steps" in changes and same_schedule:
        changes |= _learning_rate_change(run, cfg)
  except BaseException:
    run.__exit__()
    raise
  return changes


def _learning_rate_change(run: RunFolder, cfg: config.Train) -> dict[str, str]:
  """A line if another number of steps changes the learning rate of the next step."""
  old, step = run.load_config(), store.newest_step(run.checkpoints) or 0
  rate = lambda c: np.asarray(make_schedule(c.optimizer, c.steps)(step)).item()
  before, now = rate(old), rate(cfg)
  if np.isclose(before, now, rtol=1e-3):
    return {}
  return {
    "learning rate": f"learning rate of step {step}: {before:.3g} with steps={old.steps},"
    f" {now:.3g} with steps={cfg.steps}, over which optimizer.schedule="
    f"{cfg.optimizer.schedule!r} is stretched; 'constant' and 'inverse_sqrt' are not"
  }


def _check_writable(path: Path) -> None:
  if path.exists() and not path.is_dir():
    raise RunFolderError(f"run_dir={str(path)!r} is a file; a run needs its own folder.")
  checkpoints = path / "checkpoints"
  try:
    make_folder(path)
    with tempfile.TemporaryFile(dir=path) as file:
      file.write(b"x")
    if checkpoints.exists() and not checkpoints.is_dir():
      raise RunFolderError(f"{checkpoints} is a file; a run needs a folder there.")
  except OSError as error:
    raise _not_writable(path, error) from error


def _not_writable(path: Path, error: OSError) -> RunFolderError:
  return RunFolderError(
    f"run_dir={str(path)!r} cannot be written ({error.strerror or error}); use another with "
    "--set run_dir=FOLDER."
  )

"""The folder of a run: config.json, metrics.jsonl, checkpoints/, and a lock against other runs.

Also programs/, compiled programs, and on a GPU kernels/, the compiler's autotuning results: a
restart takes seconds and computes the same bits.
"""

import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from lnssm_jax.pretrained.files import FORMAT
from train import config
from train.checkpoint import digests, store
from train.cluster import distributed
from train.config.changes import differences, is_free
from train.config.versions import versions
from train.config.vision import Vision
from train.runs.config_file import CONFIG, RunFolderError, read, read_config
from train.runs.rows import Row, wrong_row
from train.step.optimizer import make_schedule


class RunFolder:
  """The files of one run. With several processes, only process 0 writes them."""

  def __init__(self, path: str | Path):
    self.path = Path(path)
    self.config_file = self.path / CONFIG
    self.metrics_file = self.path / "metrics.jsonl"
    self.checkpoints = self.path / "checkpoints"
    self.kernels = self.path / "kernels"
    self.changes: dict[str, str] = {}  # of settings since the last start of the run
    self.on_rows: Callable[[list[Row]], object] = lambda rows: None  # called in process 0
    self._id: str | None = None  # known after `write_config`
    self._lock: int | None = None
    self._unwritten = ""  # rows that could not be written yet

  def __enter__(self) -> "RunFolder":
    return self

  def __exit__(self, *_) -> None:
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None

  def load_config(self) -> config.Train:
    """Reads the config of the run.

    Raises:
      RunFolderError: config.json is missing or unreadable.
    """
    return read_config(self.path)

  def write_config(self, cfg: config.Train | Vision) -> None:
    """Writes config.json: the config, the versions of the code, and the id of the run."""
    if not distributed.is_first():
      return
    self._id = digests.run_id(self.path) or secrets.token_hex(8)
    values = config.to_dict(cfg) | {"format": FORMAT, "versions": versions(), "run": self._id}
    _write_atomically(self.config_file, json.dumps(values, indent=2) + "\n")

  def read_rows(self) -> list[Row]:
    """Reads the rows of metrics.jsonl, without a last line that a crash cut off.

    Raises:
      RunFolderError: any other line is damaged, or of another run.
    """
    if not self.metrics_file.exists():
      return []
    own = self._id or digests.run_id(self.path)
    lines, rows = self.metrics_file.read_bytes().splitlines(), []
    for number, line in enumerate(lines, 1):
      try:
        row = json.loads(line)
      except (ValueError, RecursionError) as error:
        if number < len(lines):
          raise self._damaged_row(number, error) from error
        return rows
      wrong = wrong_row(row)
      if wrong is not None:
        raise self._damaged_row(number, wrong)
      if row.pop("run", own) != own and own is not None:
        raise self._damaged_row(number, "a row of another run")
      rows.append(row)
    return rows

  def _damaged_row(self, number: int, why: object) -> RunFolderError:
    return RunFolderError(
      f"{self.metrics_file}, line {number}, is damaged ({why}); remove that line."
    )

  def append(self, rows: list[Row]) -> list[Row]:
    """Appends rows to metrics.jsonl, all or none, and returns them.

    Rows that do not fit on the disk are kept in memory and written with the next call.
    """
    if distributed.is_first():
      self.on_rows(rows)
      self._unwritten += self._lines(rows)
      if self._write(self._unwritten.encode()):
        self._unwritten = ""
    return rows

  def _lines(self, rows: list[Row]) -> str:
    own = self._id or digests.run_id(self.path)
    bound = {} if own is None else {"run": own}
    return "".join(json.dumps(row | bound) + "\n" for row in rows)

  def _write(self, text: bytes) -> bool:
    """Appends all of `text`, or nothing."""
    try:
      with self.metrics_file.open("ab", buffering=0) as file:
        end = file.tell()
        try:
          if file.write(text) == len(text):
            return True
        except OSError:
          pass
        file.truncate(end)
    except OSError:
      pass
    return False

  def keep_rows_until(self, step: int) -> list[Row]:
    """Removes the rows of later steps, which will be trained again, from metrics.jsonl."""
    rows = [row for row in self.read_rows() if row["step"] <= step]
    if distributed.is_first():
      _write_atomically(self.metrics_file, self._lines(rows))
    return rows

  def skipped_steps(self) -> list[int]:
    """Steps skipped by the step guard (`train.step.step_guard`), in ascending order."""
    return distributed.on_first(
      lambda: [row["step"] for row in self.read_rows() if row["kind"] == "skipped"]
    )

  def evaluation(self, step: int, sets: Iterable[str]) -> list[Row]:
    """Rows of the evaluation at `step` if it covered all `sets`, else an empty list."""
    return distributed.on_first(lambda: self._evaluation(step, sets))

  def _evaluation(self, step: int, sets: Iterable[str]) -> list[Row]:
    rows = {r["set"]: r for r in self.read_rows() if r["kind"] == "eval" and r["step"] == step}
    return [rows[name] for name in sets] if rows.keys() >= set(sets) else []


def claim(cfg: config.Train | Vision, *, allow_config_change: bool = False) -> RunFolder:
  """Locks `cfg.run_dir` for training by this process alone; writes nothing.

  Raises:
    RunFolderError: it is a file, not writable, in use, or belongs to another config.
  """
  run = RunFolder(cfg.run_dir)
  run.changes = distributed.on_first(lambda: _claim(run, cfg, allow_config_change))
  return run


def _claim(run: RunFolder, cfg: config.Train | Vision, allow_config_change: bool) -> dict[str, str]:
  """Locks the folder; returns the settings that differ from those of its run."""
  _check_writable(run.path)
  run._lock = _lock(run.path)
  try:
    changes = {}
    if store.newest_step(run.checkpoints) is not None:  # otherwise there is nothing to protect
      changes = differences(read(run.path, type(cfg)), cfg)
      rejected = [line for name, line in changes.items() if not is_free(name)]
      if rejected and not allow_config_change:
        raise RunFolderError(
          f"{run.path} belongs to a run with other settings:\n  " + "\n  ".join(rejected) + "\n"
          "Restore them to resume that run, start a new one with --set run_dir=ANOTHER, or resume "
          "with these settings by --allow-config-change."
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
  try:
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path) as file:
      file.write(b"x")
  except OSError as error:
    raise RunFolderError(
      f"run_dir={str(path)!r} cannot be written ({error.strerror}); use another with "
      "--set run_dir=FOLDER."
    ) from error


def _lock(path: Path) -> int | None:
  """Locks the folder until the returned descriptor is closed or the process ends in any way."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    os.close(descriptor)
    raise RunFolderError(
      f"another process is training in {path}; wait for it, or use --set run_dir=ANOTHER."
    ) from None
  except OSError:  # the file system has no locks
    os.close(descriptor)
    return None
  return descriptor


def _write_atomically(path: Path, text: str) -> None:
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_text(text)
  temporary.replace(path)

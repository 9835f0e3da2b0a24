"""The folder of a run: config.json, metrics.jsonl, checkpoints/, and who may write there.

On a GPU also kernels/: which kernels the compiler chose, for the same bits after a restart.
"""

import fcntl
import importlib.metadata
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lnssm_jax
from train import checkpoint, config, distributed
from train.files import read_json
from train.metrics import Row, wrong_row

# Settings that a resumed run may change: none of them changes what an exact step computes beyond
# rounding, except `steps`, without which no run could be made longer.
FREE = (
  "steps",
  "accumulate",
  "checkpoint_every",
  "eval_every",
  "log_every",
  "keep_checkpoints",
  "max_skipped",
  "loss_chunk",
  "watch",
  "compile_cache",
  "sample",
  "mesh",
  "model.remat",
  "model.unroll",
)


_MOST_CONFIG = 1 << 24  # bytes of config.json


class RunFolderError(ValueError):
  """The run folder cannot be used for this run; the message says why and what to do."""


class RunFolder:
  """The files of one run. With several processes, only the first one writes them."""

  def __init__(self, path: str | Path):
    self.path = Path(path)
    self.config_file = self.path / "config.json"
    self.metrics_file = self.path / "metrics.jsonl"
    self.checkpoints = self.path / "checkpoints"
    self.kernels = self.path / "kernels"
    self.changes: dict[str, str] = {}  # of settings, since the run was last started
    self.on_rows: Callable[[list[Row]], object] = lambda rows: None  # told in the first process
    self._lock: int | None = None
    self._unwritten = ""  # rows that the disk has not taken

  def __enter__(self) -> "RunFolder":
    return self

  def __exit__(self, *_) -> None:
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None

  def load_config(self) -> config.Train:
    """The settings that the run was started with.

    Raises:
      RunFolderError: there is no readable config.json.
    """
    try:
      values = read_json(self.config_file, _MOST_CONFIG)
      values.pop("versions", None)
      return config.from_dict(values)
    except FileNotFoundError:
      raise RunFolderError(
        f"{self.path} is not a run folder: it has no config.json. Give the run_dir of a run that "
        "`python -m train fit` has started."
      ) from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
      raise RunFolderError(f"{self.config_file} is damaged: {error}") from error

  def write_config(self, cfg: config.Train) -> None:
    """Writes config.json: the settings, and the versions of what runs them."""
    if not distributed.is_first():
      return
    values = config.to_dict(cfg) | {"versions": versions()}
    _write_atomically(self.config_file, json.dumps(values, indent=2) + "\n")

  def read_rows(self) -> list[Row]:
    """The rows of metrics.jsonl; a last line that a crash cut off is left out.

    Raises:
      RunFolderError: another line is damaged.
    """
    if not self.metrics_file.exists():
      return []
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
      rows.append(row)
    return rows

  def _damaged_row(self, number: int, why: object) -> RunFolderError:
    return RunFolderError(
      f"{self.metrics_file}, line {number}, is damaged ({why}); remove that line."
    )

  def append(self, rows: list[Row]) -> list[Row]:
    """Writes rows, together, at the end of metrics.jsonl, and returns them.

    Rows for which the disk has no room are kept, and written before those of the next call.
    """
    if distributed.is_first():
      self.on_rows(rows)
      self._unwritten += "".join(json.dumps(row) + "\n" for row in rows)
      if self._write(self._unwritten.encode()):
        self._unwritten = ""
    return rows

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
    """Takes rows of later steps, which will be trained again, out of metrics.jsonl."""
    rows = [row for row in self.read_rows() if row["step"] <= step]
    if distributed.is_first():
      _write_atomically(self.metrics_file, "".join(json.dumps(row) + "\n" for row in rows))
    return rows

  def skipped_steps(self) -> list[int]:
    """The steps that were left out (`train.skip`), in ascending order."""
    return distributed.on_first(
      lambda: [row["step"] for row in self.read_rows() if row["kind"] == "skipped"]
    )

  def evaluation(self, step: int, sets: Iterable[str]) -> list[Row]:
    """The rows of an evaluation at `step` that reached all `sets`, else none."""
    return distributed.on_first(lambda: self._evaluation(step, sets))

  def _evaluation(self, step: int, sets: Iterable[str]) -> list[Row]:
    rows = {r["set"]: r for r in self.read_rows() if r["kind"] == "eval" and r["step"] == step}
    return [rows[name] for name in sets] if rows.keys() >= set(sets) else []


def claim(cfg: config.Train, *, allow_config_change: bool = False) -> RunFolder:
  """Opens `cfg.run_dir` for training by this run alone; writes nothing.

  Raises:
    RunFolderError: it is a file, cannot be written, is in use, or belongs to another config.
  """
  run = RunFolder(cfg.run_dir)
  run.changes = distributed.on_first(lambda: _claim(run, cfg, allow_config_change))
  return run


def _claim(run: RunFolder, cfg: config.Train, allow_config_change: bool) -> dict[str, str]:
  """Locks the folder; returns the settings that differ from its run's."""
  _check_writable(run.path)
  run._lock = _lock(run.path)
  try:
    changes = {}
    if checkpoint.newest_step(run.checkpoints) is not None:  # else there is nothing to protect
      changes = differences(run.load_config(), cfg)
      refused = [line for name, line in changes.items() if not _is_free(name)]
      if refused and not allow_config_change:
        raise RunFolderError(
          f"{run.path} belongs to a run with other settings:\n  " + "\n  ".join(refused) + "\n"
          "Put them back to continue that run, start a new one with --set run_dir=ANOTHER, or "
          "continue it with these settings by --allow-config-change."
        )
  except BaseException:
    run.__exit__()
    raise
  return changes


def differences(old: config.Train, new: config.Train) -> dict[str, str]:
  """{setting: "setting: what the old run has and what the new one has"}, where two runs differ."""
  before, now = (dict(_flatten(config.to_dict(c))) for c in (old, new))
  lines = {}
  for name in sorted(before.keys() | now.keys()):
    a, b = (repr(values[name]) if name in values else "nothing" for values in (before, now))
    if a != b and name != "run_dir":
      lines[name] = f"{name}: the folder's run has {a}, this one {b}"
  return lines


def _is_free(name: str) -> bool:
  return any(name == free or name.startswith(f"{free}.") for free in FREE)


def versions() -> dict[str, str | None]:
  """What the code of a run was: package versions, and the commit of the checkout if it is one."""
  here = Path(__file__).parent
  try:
    commit = subprocess.run(
      ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
      cwd=here,
      capture_output=True,
      text=True,
      check=True,
      timeout=10,
    ).stdout.strip()
  except (OSError, subprocess.SubprocessError):
    commit = None
  packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
  installed = {name: importlib.metadata.version(name) for name in packages}
  return {"lnssm_jax": lnssm_jax.__version__, **installed, "git_commit": commit}


def _flatten(values: dict[str, Any], prefix: str = ""):
  for name, value in values.items():
    if isinstance(value, dict) and value:
      yield from _flatten(value, f"{prefix}{name}.")
    else:
      yield prefix + name, value


def _check_writable(path: Path) -> None:
  if path.exists() and not path.is_dir():
    raise RunFolderError(f"run_dir={str(path)!r} is a file; a run needs a folder of its own.")
  try:
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path) as file:
      file.write(b"x")
  except OSError as error:
    raise RunFolderError(
      f"run_dir={str(path)!r} cannot be written ({error.strerror}); give another with "
      "--set run_dir=FOLDER."
    ) from error


def _lock(path: Path) -> int | None:
  """Holds the folder until the returned descriptor is closed or the process ends, however."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    os.close(descriptor)
    raise RunFolderError(
      f"another process is training in {path}; wait for it, or use --set run_dir=ANOTHER."
    ) from None
  except OSError:  # a file system without locks
    os.close(descriptor)
    return None
  return descriptor


def _write_atomically(path: Path, text: str) -> None:
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_text(text)
  temporary.replace(path)

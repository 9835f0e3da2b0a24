"""Optional loggers for the rows of metrics.jsonl: TensorBoard, Weights & Biases (`watch=...`).

A thread sends the rows, so that no logger can delay training. The first error of a logger is
reported and the logger is dropped; metrics.jsonl is always complete.
"""

import importlib
import queue
import secrets
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from lnssm_jax.files.atomic import replace_file
from lnssm_jax.files.reading import read_bytes
from train import config
from train.config import ConfigError
from train.messages import Say, first_line
from train.runs.rows import Row

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
_MAX_WAITING = 10_000  # rows; later ones are dropped
_PATIENCE = 60.0  # seconds that the end of a run waits for unsent rows


class Logger(Protocol):
  """Destination of rows."""

  def write(self, row: Row) -> None:
    """Sends one row."""
    ...

  def close(self) -> None:
    """Waits until all rows are sent."""
    ...


class TensorBoard:
  """Event files in RUN/tensorboard."""

  def __init__(self, package: Any, run: Path, cfg: config.Train, start: int):
    # Later steps are trained, and logged, again.
    options = {"purge_step": start + 1} if start else {}
    self._writer = package.SummaryWriter(str(run / "tensorboard"), flush_secs=10, **options)
    names = {"name": cfg.run_name, "group": cfg.run_group, "tags": ", ".join(cfg.run_tags)}
    for name, text in names.items():
      if text:
        self._writer.add_text(f"run/{name}", text, start)

  def write(self, row: Row) -> None:
    for name, value in scalars(row).items():
      self._writer.add_scalar(name, value, row["step"])

  def close(self) -> None:
    self._writer.close()


class WandB:
  """A run of Weights & Biases, configured by its environment variables: WANDB_PROJECT, ...

  `run_group` and `run_tags`, where set, take the place of WANDB_RUN_GROUP and WANDB_TAGS.
  """

  def __init__(self, package: Any, run: Path, cfg: config.Train, start: int):
    del start
    self._run = package.init(
      dir=str(run),
      name=cfg.run_name or run.name,
      group=cfg.run_group,
      tags=cfg.run_tags or None,
      id=_identity(run / "wandb-id"),
      resume="allow",
      config=config.to_dict(cfg),
    )
    # Its built-in step cannot decrease, as it does when a killed run is resumed.
    self._run.define_metric("*", step_metric="step")

  def write(self, row: Row) -> None:
    self._run.log(scalars(row) | {"step": row["step"]})

  def close(self) -> None:
    self._run.finish()


_LOGGERS: dict[str, Callable[[Any, Path, config.Train, int], Logger]] = {
  "tensorboard": TensorBoard,
  "wandb": WandB,
}


def scalars(row: Row) -> dict[str, float]:
  """Numbers of a row under their logged names: train/loss, eval/validation/val_loss, ...

  Auxiliary outputs of a layer are train/aux/LAYER/loss, dead, and share/PART.
  """
  prefix = "/".join([row["kind"], *([row["set"]] if "set" in row else [])])
  numbers = {name: value for name, value in row.items() if name != "step"}
  for columns in row.get("aux", []):
    place = f"aux/{columns['layer']}"
    numbers |= {f"{place}/{name}": columns[name] for name in ("loss", "dead")}
    numbers |= {f"{place}/share/{n}": x for n, x in enumerate(columns.get("share", []))}
  return {f"{prefix}/{n}": x for n, x in numbers.items() if isinstance(x, int | float)}


def check(names: Iterable[str]) -> None:
  """Raises ConfigError with the install command if a package for one of `names` is missing."""
  for name in names:
    _package(name)


class Loggers:
  """Sends rows to every logger in `cfg.watch`, whose packages are installed (`check`)."""

  def __init__(self, cfg: config.Train, run: Path, start: int, say: Say):
    self._say = say
    packages = {name: _package(name) for name in cfg.watch}
    self._rows: queue.Queue[Row | None] = queue.Queue(_MAX_WAITING)
    self._is_full = False
    self._open = {
      name: lambda name=name, package=package: _LOGGERS[name](package, run, cfg, start)
      for name, package in packages.items()
    }
    self._thread = threading.Thread(target=self._work, daemon=True) if packages else None
    if self._thread:
      self._thread.start()

  def __enter__(self) -> "Loggers":
    return self

  def __exit__(self, *_) -> None:
    if self._thread:
      self._put(None)
      self._thread.join(_PATIENCE)
      if self._thread.is_alive():
        self._say(f"watch={','.join(self._open)}: not all rows were sent within {_PATIENCE:.0f} s")

  def write(self, rows: list[Row]) -> None:
    """Enqueues rows without blocking; they are sent in the background."""
    if self._thread:
      for row in rows:
        self._put(row)

  def _put(self, row: Row | None) -> None:
    try:
      self._rows.put_nowait(row)
    except queue.Full:
      if not self._is_full:
        self._say(f"watch={','.join(self._open)} is too slow; some rows are dropped there")
      self._is_full = True
      if row is None:  # the end marker must be delivered
        self._rows.get_nowait()
        self._rows.put_nowait(None)

  def _work(self) -> None:
    loggers: dict[str, Logger] = {}
    for name, make in self._open.items():
      self._try(name, lambda name=name, make=make: loggers.update({name: make()}))
    while (row := self._rows.get()) is not None:
      for name, logger in list(loggers.items()):
        if not self._try(name, lambda logger=logger, row=row: logger.write(row)):
          del loggers[name]
    for name, logger in loggers.items():
      self._try(name, logger.close)

  def _try(self, name: str, call: Callable[[], object]) -> bool:
    try:
      call()
    except Exception as error:
      self._say(f"watch={name} failed ({first_line(error)}); training continues without it")
      return False
    return True


def _package(name: str) -> Any:
  try:
    return importlib.import_module(_PACKAGES[name])
  except ImportError as error:
    raise ConfigError(
      f"watch={name} needs the package {_PACKAGES[name]}, which cannot be imported ({error}): "
      f"pip install {_PACKAGES[name]}"
    ) from error


def _identity(file: Path) -> str:
  """Identifier of the run that persists when it is resumed."""
  try:
    return read_bytes(file, 100).decode().strip()
  except FileNotFoundError:
    name = secrets.token_hex(8)
    replace_file(file, name.encode())
    return name

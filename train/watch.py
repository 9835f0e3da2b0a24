"""Rows of metrics.jsonl, sent to TensorBoard and Weights & Biases as well; by option, `watch=...`.

A thread sends them, so that neither can hold a run up. Whatever goes wrong there is told once, and
that one is left alone from then on; metrics.jsonl has everything.
"""

import importlib
import queue
import secrets
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from train import config
from train.metrics import Row
from train.settings import ConfigError

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
_MOST_WAITING = 10_000  # rows; later ones are left out
_PATIENCE = 60.0  # seconds that the end of a run waits for what was not sent yet


class Sink(Protocol):
  """Where rows go."""

  def write(self, row: Row) -> None:
    """Sends one row."""
    ...

  def close(self) -> None:
    """Waits until all is sent."""
    ...


class TensorBoard:
  """Event files in RUN/tensorboard."""

  def __init__(self, package: Any, run: Path, cfg: config.Train, start: int):
    del cfg
    # What was written of later steps is trained, and written, again.
    options = {"purge_step": start + 1} if start else {}
    self._writer = package.SummaryWriter(str(run / "tensorboard"), flush_secs=10, **options)

  def write(self, row: Row) -> None:
    for name, value in scalars(row).items():
      self._writer.add_scalar(name, value, row["step"])

  def close(self) -> None:
    self._writer.close()


class WandB:
  """A run of Weights & Biases, whose own environment variables say where: WANDB_PROJECT, ..."""

  def __init__(self, package: Any, run: Path, cfg: config.Train, start: int):
    del start
    self._run = package.init(
      dir=str(run),
      name=run.name,
      id=_identity(run / "wandb-id"),
      resume="allow",
      config=config.to_dict(cfg),
    )
    # Its own steps could not go back, as a run that was killed does.
    self._run.define_metric("*", step_metric="step")

  def write(self, row: Row) -> None:
    self._run.log(scalars(row) | {"step": row["step"]})

  def close(self) -> None:
    self._run.finish()


_SINKS: dict[str, Callable[[Any, Path, config.Train, int], Sink]] = {
  "tensorboard": TensorBoard,
  "wandb": WandB,
}


def scalars(row: Row) -> dict[str, float]:
  """The numbers of a row by the names they get: train/loss, eval/validation/val_loss, ..."""
  prefix = "/".join([row["kind"], *([row["set"]] if "set" in row else [])])
  return {
    f"{prefix}/{name}": value
    for name, value in row.items()
    if name != "step" and isinstance(value, int | float)
  }


def check(names: Iterable[str]) -> None:
  """Raises ConfigError, saying what to install, if a package is missing for one of `names`."""
  for name in names:
    _package(name)


class Watch:
  """Sends rows to everything in `cfg.watch`, whose packages are there (`check`)."""

  def __init__(self, cfg: config.Train, run: Path, start: int, say: Callable[[str], object]):
    self._say = say
    packages = {name: _package(name) for name in cfg.watch}
    self._rows: queue.Queue[Row | None] = queue.Queue(_MOST_WAITING)
    self._is_full = False
    self._open = {
      name: lambda name=name, package=package: _SINKS[name](package, run, cfg, start)
      for name, package in packages.items()
    }
    self._thread = threading.Thread(target=self._work, daemon=True) if packages else None
    if self._thread:
      self._thread.start()

  def __enter__(self) -> "Watch":
    return self

  def __exit__(self, *_) -> None:
    if self._thread:
      self._put(None)
      self._thread.join(_PATIENCE)
      if self._thread.is_alive():
        self._say(f"watch={','.join(self._open)}: not all was sent within {_PATIENCE:.0f} s")

  def write(self, rows: list[Row]) -> None:
    """Takes rows, at once; they are sent in the background."""
    if self._thread:
      for row in rows:
        self._put(row)

  def _put(self, row: Row | None) -> None:
    try:
      self._rows.put_nowait(row)
    except queue.Full:
      if not self._is_full:
        self._say(f"watch={','.join(self._open)} is too slow; some rows are left out there")
      self._is_full = True
      if row is None:  # the end must get through
        self._rows.get_nowait()
        self._rows.put_nowait(None)

  def _work(self) -> None:
    sinks: dict[str, Sink] = {}
    for name, make in self._open.items():
      self._careful(name, lambda name=name, make=make: sinks.update({name: make()}))
    while (row := self._rows.get()) is not None:
      for name, sink in list(sinks.items()):
        if not self._careful(name, lambda sink=sink, row=row: sink.write(row)):
          del sinks[name]
    for name, sink in sinks.items():
      self._careful(name, sink.close)

  def _careful(self, name: str, call: Callable[[], object]) -> bool:
    try:
      call()
    except Exception as error:
      text = f"{type(error).__name__}: {error}".split("\n")[0][:200]
      self._say(f"watch={name} does not work ({text}); training goes on without it")
      return False
    return True


def _package(name: str) -> Any:
  try:
    return importlib.import_module(_PACKAGES[name])
  except ImportError as error:
    raise ConfigError(
      f"watch={name} needs the package {_PACKAGES[name]}, which cannot be imported ({error}): "
      f"pip install -e '.[{name}]'"
    ) from error


def _identity(file: Path) -> str:
  """A name for the run that stays when it is resumed."""
  if not file.exists():
    file.write_text(secrets.token_hex(8))
  return file.read_text().strip()

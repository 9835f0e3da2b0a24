"""Callbacks that a config names: early stopping, the best checkpoint, texts, a plot.

A config names callbacks as MODULE:FUNCTION, with the options of the function:

    callbacks={"train.callbacks:early_stopping": {"patience": 3}}

The function returns a `train.loop.Callback`. With several processes each of them has one, and all
must decide alike: what a `Moment` holds is the same in all of them.
"""

import dataclasses
import math
from typing import Any

from flax import nnx

from lnssm_jax.files.atomic import make_folder, replace_file
from lnssm_jax.pretrained import texts
from train import config
from train.checkpoint.store import Checkpoints
from train.cluster import distributed
from train.config import functions
from train.data.tokenizers import tokenizer_of
from train.logging import plot
from train.loop import Callback, Moment
from train.runs.config_file import CONFIG
from train.runs.loading import sampling_options


def made(cfg: config.Train) -> list[Callback]:
  """The callbacks of a config.

  Raises:
    ConfigError: one cannot be imported or called, or is no `Callback`.
  """
  found = []
  for name, options in cfg.callbacks.items():
    try:
      one = functions.found(name)(**options)
      if not isinstance(one, Callback):
        raise TypeError(f"it returned {type(one).__name__}, not a train.loop.Callback")
    except (Exception, SystemExit) as error:
      raise config.ConfigError(
        f"callbacks={name!r} with the options {options} cannot be used:"
        f" {functions.explained(error)}."
      ) from error
    found.append(one)
  return found


def early_stopping(patience: int, least: float = 0.0, name: str | None = None) -> Callback:
  """Ends a run when its validation loss has not fallen for `patience` evaluations.

  Args:
    least: by how many nats it must fall below the lowest so far.
    name: of the validation set; None: the first.

  Raises:
    ValueError: `patience` is less than 1, or `least` is negative.
  """
  if patience < 1 or least < 0:
    raise ValueError(f"patience={patience} must be at least 1 and least={least} at least 0")
  return _EarlyStopping(patience, least, name)


def keep_best(name: str | None = None) -> Callback:
  """Keeps the checkpoint with the lowest validation loss in RUN/best, which opens like a run.

  Args:
    name: of the validation set; None: the first.
  """
  return _KeepBest(name)


def sample_texts(file: str = "samples.txt") -> Callback:
  """Appends a text, drawn as `sample` of the config says, to a file of the run folder."""
  return _SampleTexts(file)


def loss_curves(file: str = "losses.png") -> Callback:
  """Draws the losses so far into a .png, .pdf or .svg of the run folder, as `lnssm-train plot`.

  Raises:
    ValueError: the file has another ending.
  """
  if not file.endswith((".png", ".pdf", ".svg")):
    raise ValueError(f"file={file!r} must end in .png, .pdf or .svg")
  return _LossCurves(file)


def sample_of(cfg: config.Train, graph: Any, params: Any) -> str:
  """A text drawn as `cfg.sample` says, with its prompt.

  Raises:
    ValueError: the model cannot generate it.
  """
  tokenizer = tokenizer_of(cfg.data)
  options = sampling_options(cfg.sample, tokenizer, cfg.seed)
  model = nnx.merge(graph, params)
  return cfg.sample.prompt + texts.complete(model, tokenizer, [cfg.sample.prompt], options)[0]


def _losses(now: Moment, name: str | None) -> list[float]:
  """The losses of a validation set, by evaluation."""
  sets = now.cfg.data.validation
  name = name or next(iter(sets), None)
  if name not in sets:
    raise config.ConfigError(
      f"a callback compares the loss of the validation set {name!r}, which is not in"
      f" data.validation={list(sets)}; name one of them."
    )
  return [row["val_loss"] for row in now.evaluations if row["set"] == name]


@dataclasses.dataclass(frozen=True)
class _EarlyStopping(Callback):
  patience: int
  least: float
  name: str | None

  def started(self, now: Moment) -> str | None:
    return self.evaluated(now)

  def evaluated(self, now: Moment) -> str | None:
    lowest, since = math.inf, 0
    for loss in _losses(now, self.name):
      since = 0 if loss < lowest - self.least else since + 1
      lowest = min(lowest, loss)
    if since < self.patience:
      return None
    return f"early stopping: the validation loss has not fallen for {since} evaluations"


@dataclasses.dataclass(frozen=True)
class _KeepBest(Callback):
  name: str | None

  def started(self, now: Moment) -> None:
    _losses(now, self.name)  # raises before the first step

  def evaluated(self, now: Moment) -> None:
    losses = _losses(now, self.name)
    if not losses or losses[-1] > min(losses):
      return
    best = now.path / "best"
    if distributed.is_first():
      make_folder(best)
      replace_file(best / CONFIG, (now.path / CONFIG).read_bytes())
    with Checkpoints(best / "checkpoints", keep=1, say=now.say) as checkpoints:
      checkpoints.save(now.step, now.state, now.metadata())
      checkpoints.wait()


@dataclasses.dataclass(frozen=True)
class _SampleTexts(Callback):
  file: str

  def evaluated(self, now: Moment) -> None:
    if distributed.count() > 1:  # no process has all parameters of the model
      return
    try:
      text = sample_of(now.cfg, now.graph, now.state["params"])
    except ValueError as error:
      text = f"no text: {error}"
    with (now.path / self.file).open("a", encoding="utf-8", errors="replace") as file:
      file.write(f"--- step {now.step}\n{text}\n")


@dataclasses.dataclass(frozen=True)
class _LossCurves(Callback):
  file: str

  def evaluated(self, now: Moment) -> None:
    if distributed.is_first():
      plot.draw([now.path], now.path / self.file)

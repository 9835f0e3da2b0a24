"""A task of the command line, and options that tasks share: types of values, models, files."""

import argparse
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lnssm_jax.files import buckets
from train.scoring.report import Report


@dataclasses.dataclass(frozen=True)
class Task:
  """A task of the command line.

  Attributes:
    name, help: as `--help` shows them.
    run: makes the report of the parsed options; None if the task has printed what it did.
    add_options: adds the task's options to its parser.
  """

  name: str
  help: str
  run: Callable[[argparse.Namespace], Report | None]
  add_options: Callable[[Any], None]


def _number[Number: (int, float)](
  name: str, kind: Callable[[str], Number], allows: Callable[[Number], bool], rule: str
) -> Callable[[str], Number]:
  """A type of values, which argparse calls `name` in messages: numbers of a kind with a rule."""

  def parse(text: str) -> Number:
    value = kind(text)
    if not allows(value):
      raise argparse.ArgumentTypeError(f"{text} must be {rule}")
    return value

  parse.__name__ = name
  return parse


count = _number("count", int, lambda n: n >= 1, "at least 1")
whole = _number("count", int, lambda n: n >= 0, "at least 0")
rate = _number("rate", float, lambda x: 0 < x < float("inf"), "a positive number")
share = _number("share", float, lambda x: 0 < x < 1, "between 0 and 1")
seed = _number("seed", int, lambda n: 0 <= n < 2**31, "in [0, 2**31)")


def output(*suffixes: str) -> Callable[[str], Path]:
  """A type of files to write, checked before a task runs: afterwards its result would be lost."""

  def parse(text: str) -> Path:
    path = Path(text)
    if buckets.is_address(text):
      raise argparse.ArgumentTypeError(f"{text} is the address of a bucket; give a local file")
    if suffixes and path.suffix.lower() not in suffixes:
      raise argparse.ArgumentTypeError(f"{text} must end in {' or '.join(suffixes)}")
    if os.path.isdir(path):
      raise argparse.ArgumentTypeError(f"{text} is a folder; name a file, such as one inside of it")
    if not os.path.isdir(path.parent):
      raise argparse.ArgumentTypeError(f"there is no folder {path.parent} for {text}; create it")
    return path

  return parse


def picture(text: str) -> Path:
  """A type of pictures to write, in the formats of matplotlib."""
  try:
    from matplotlib.backend_bases import FigureCanvasBase
  except ImportError:
    message = "a plot needs the package matplotlib: pip install matplotlib"
    raise argparse.ArgumentTypeError(message) from None
  return output(*(f".{name}" for name in FigureCanvasBase.get_supported_filetypes()))(text)


def add_model(parser: Any) -> None:
  """MODEL and --step, which `loaded` reads."""
  where = "a run folder, an exported or a published model"
  parser.add_argument("model", metavar="MODEL", help=where)
  parser.add_argument("--step", type=count, metavar="N", help="another checkpoint of a run")


def loaded(options: argparse.Namespace) -> Any:
  """The model of the options, a `LoadedModel`."""
  from train.runs import loading

  return loading.load_model(options.model, step=options.step)


def add_config(parser: Any, *, required: bool = True) -> None:
  """--config and --set, which `train.cli.commands` reads."""
  where = "Python file with get_config()"
  parser.add_argument("--config", metavar="FILE[:VARIANT]", required=required, help=where)
  add_set(parser)


def add_set(parser: Any) -> None:
  """--set."""
  text = "override a setting (repeatable)"
  parser.add_argument("--set", metavar="A.B=VALUE", action="append", default=[], help=text)


def add_batch(parser: Any) -> None:
  """--batch."""
  parser.add_argument("--batch", type=count, default=8, metavar="N", help="sequences at once")

"""A task of the command line, and options that tasks share: types of values, models, samples."""

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.tasks.report import Report

MAX_PROMPT = 2**26  # tokens
MAX_TOKENS = 2**31  # of the prompts of a command, all of which are made before they are used
_BYTES_PER_TOKEN = 4


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


def check_prompts(option: str, lengths: Sequence[int], samples: int) -> None:
  """Raises ValueError if prompts of these lengths, `samples` of each, are more than memory holds.

  Args:
    option: of the command line, for the message.
  """
  longest, total = max(lengths, default=0), sum(lengths) * samples
  size = f"{total * _BYTES_PER_TOKEN / 1e9:,.1f} GB of text"
  if longest > MAX_PROMPT:
    raise ValueError(
      f"{option} {longest:,}: a prompt has at most {MAX_PROMPT:,} tokens, and these would be about"
      f" {size}; use shorter ones."
    )
  if total > MAX_TOKENS:
    raise ValueError(
      f"{option} {longest:,} with {samples:,} samples: the prompts would be {total:,} tokens, about"
      f" {size}, and {MAX_TOKENS:,} tokens are the most; use fewer samples, or shorter ones."
    )


def check_rows(rows: int, length: int) -> None:
  """Raises ValueError if so many rows of this length are more tokens than memory holds."""
  if rows * length > MAX_TOKENS:
    raise ValueError(
      f"{rows:,} rows of {length:,} tokens are about {4 * rows * length / 1e9:,.1f} GB;"
      f" {MAX_TOKENS:,} tokens are the most, so use fewer rows."
    )


def kind_of[Kind](name: str, kinds: Mapping[str, Kind]) -> Kind:
  """The kind of this name.

  Raises:
    ValueError: it is unknown.
  """
  if name not in kinds:
    raise ValueError(f"kind={name!r} is not known; use one of {', '.join(kinds)}.")
  return kinds[name]


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
  add = parser.add_argument
  add("--config", metavar="FILE[:VARIANT]", required=required, help="Python file with get_config()")
  add("--set", metavar="A.B=VALUE", action="append", default=[], help="override a setting")


def add_write(parser: Any) -> None:
  """--write."""
  text = "write rows to train on, {prompt, completion}, and do not score"
  parser.add_argument("--write", type=output(".jsonl"), metavar="FILE.jsonl", help=text)


def add_batch(parser: Any) -> None:
  """--batch."""
  parser.add_argument("--batch", type=count, default=8, metavar="N", help="sequences at once")


def add_samples(parser: Any) -> None:
  """SAMPLES, --limit and --batch."""
  add = parser.add_argument
  add("samples", nargs="+", metavar="SAMPLES", help=".jsonl or .jsonl.xz file, or a folder of such")
  add("--limit", type=count, metavar="N", help="only the first N rows of a file")
  add_batch(parser)

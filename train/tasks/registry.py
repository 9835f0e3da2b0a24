"""The tasks of `python -m train task NAME`: their options, and how they are run.

A task that trains takes `--config FILE[:VARIANT]` and `--set`; one that scores takes MODEL, a run
folder or an exported model. Each returns a `Report`. Slow imports are inside the functions.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from train import config
from train.tasks.report import Report


@dataclasses.dataclass(frozen=True)
class Task:
  """A task of the command line.

  Attributes:
    name, help: as `--help` shows them.
    run: makes the report of the parsed options.
    add_options: adds the task's own options to its parser.
    trains: whether it takes a config, not a model.
  """

  name: str
  help: str
  run: Callable[[argparse.Namespace], Report | None]
  add_options: Callable[[Any], None]
  trains: bool = False


def add_parsers(parser: argparse.ArgumentParser) -> None:
  """Adds a parser for each task, whose default `run` prints and writes the report."""
  added_to = parser.add_subparsers(
    dest="task", metavar="NAME", required=True, parser_class=type(parser)
  )
  for task in TASKS:
    added = added_to.add_parser(task.name, help=task.help, description=task.help)
    if task.trains:
      added.add_argument("--config", metavar="FILE[:VARIANT]", required=True, help="what to train")
      added.add_argument("--set", metavar="A.B=VALUE", action="append", default=[])
    else:
      added.add_argument("model", metavar="MODEL", help="a run folder or an exported model")
      added.add_argument("--step", type=_count, metavar="N", help="another checkpoint of a run")
    task.add_options(added)
    added.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers as JSON")
    added.set_defaults(run=_runner(task))


def _runner(task: Task) -> Callable[[argparse.Namespace], None]:
  def run(options: argparse.Namespace) -> None:
    report = task.run(options)
    if report is None:
      return
    print(report.text())
    if options.json:
      report.write(options.json)

  return run


def _count(text: str) -> int:
  value = int(text)
  if value < 1:
    raise argparse.ArgumentTypeError(f"{text} must be at least 1")
  return value


def _rate(text: str) -> float:
  value = float(text)
  if not 0 < value < float("inf"):
    raise argparse.ArgumentTypeError(f"{text} must be a positive number")
  return value


def _seed(text: str) -> int:
  value = int(text)
  if not 0 <= value < 2**31:
    raise argparse.ArgumentTypeError(f"{text} must be in [0, 2**31)")
  return value


# argparse names them in messages.
_count.__name__, _rate.__name__, _seed.__name__ = "count", "rate", "seed"


def _mqar_options(parser: Any) -> None:
  add = parser.add_argument
  add("--pairs", type=_count, metavar="N", help="keys with values (default: seq_len / 16)")
  add("--vocab-size", type=_count, metavar="V", help="of the task (default: the model's)")
  add("--power", type=float, default=0.01, metavar="A", help="smaller: queries follow sooner")
  add("--random-fillers", action="store_true", help="random ids, not 0, between the queries")
  add("--learning-rates", type=_rate, nargs="+", metavar="LR", help="(default: the published four)")
  add("--seeds", type=_seed, nargs="+", default=[0, 1, 2], metavar="N")
  add("--train-rows", type=_count, default=100_000, metavar="N")
  add("--test-rows", type=_count, default=3_000, metavar="N")
  add("--write", type=Path, metavar="FILE.npz", help="write the data, and do not train")


def _mqar(options: argparse.Namespace) -> Report | None:
  from train.tasks import mqar_training

  cfg = config.apply_overrides(config.load_config(options.config), options.set)
  task = mqar_training.task_of(
    cfg,
    pairs=options.pairs or max(1, cfg.seq_len // 16),
    vocab_size=options.vocab_size,
    power=options.power,
    random_fillers=options.random_fillers,
  )
  rows = {"train_rows": options.train_rows, "test_rows": options.test_rows}
  if options.write:
    mqar_training.write(task, options.write, **rows)
    print(f"{options.write}  {options.train_rows:,} and {options.test_rows:,} rows")
    return None
  return mqar_training.run(
    cfg,
    task,
    learning_rates=options.learning_rates or mqar_training.LEARNING_RATES,
    seeds=options.seeds,
    progress=lambda line: print(line, file=sys.stderr, flush=True),
    **rows,
  )


def _loaded(options: argparse.Namespace) -> Any:
  from train.runs import loading

  return loading.load_model(options.model, step=options.step)


def _batch(parser: Any) -> None:
  parser.add_argument("--batch", type=_count, default=8, metavar="N", help="sequences at once")


def _lm_options(parser: Any) -> None:
  parser.add_argument("text", nargs="+", metavar="TEXT", help="file, folder or glob; each a corpus")
  parser.add_argument("--length", type=_count, metavar="N", help="cut documents to N tokens")
  _batch(parser)


def _lm(options: argparse.Namespace) -> Report:
  from train.tasks import perplexity

  return perplexity.lm(_loaded(options), options.text, length=options.length, batch=options.batch)


def _extrapolate_options(parser: Any) -> None:
  add = parser.add_argument
  add("text", metavar="TEXT", help="file, folder or glob")
  add("--train-length", type=_count, metavar="N", help="(default: that of the run)")
  add("--times", type=_count, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N")
  add("--tokens", type=_count, metavar="N", help="read at most so many")
  add("--plot", type=Path, metavar="FILE", help="draw perplexity by length")
  _batch(parser)


def _extrapolate(options: argparse.Namespace) -> Report:
  from train.tasks import perplexity

  report = perplexity.extrapolate(
    _loaded(options),
    options.text,
    train_length=options.train_length,
    times=options.times,
    tokens=options.tokens,
    batch=options.batch,
  )
  if options.plot:
    perplexity.plot(report, options.plot)
  return report


def _samples_options(parser: Any) -> None:
  add = parser.add_argument
  add("samples", nargs="+", metavar="SAMPLES", help=".jsonl or .jsonl.xz file, or a folder of such")
  add("--limit", type=_count, metavar="N", help="only the first N rows of a file")
  _batch(parser)


def _choice(options: argparse.Namespace) -> Report:
  from train.tasks import choices

  how = {"limit": options.limit, "batch": options.batch}
  return choices.choice(_loaded(options), options.samples, **how)


def _cloze(options: argparse.Namespace) -> Report:
  from train.tasks import choices

  how = {"limit": options.limit, "batch": options.batch}
  return choices.cloze(_loaded(options), options.samples, **how)


def _babilong_options(parser: Any) -> None:
  _samples_options(parser)
  add = parser.add_argument
  add("--max-tokens", type=_count, default=8, metavar="N", help="of an answer")
  add("--top-p", type=_rate, metavar="P", help="draw answers (default: greedy)")
  add("--seed", type=_seed, default=0, metavar="N", help="of the drawing")


def _babilong(options: argparse.Namespace) -> Report:
  from train.tasks import babilong

  return babilong.run(
    _loaded(options),
    options.samples,
    max_tokens=options.max_tokens,
    top_p=options.top_p,
    seed=options.seed,
    limit=options.limit,
    batch=options.batch,
  )


def _niah_options(parser: Any) -> None:
  add = parser.add_argument
  add("--kinds", nargs="+", metavar="KIND", help="(default: all six)")
  add("--lengths", type=_count, nargs="+", required=True, metavar="N", help="in tokens")
  add("--samples", type=_count, default=100, metavar="N", help="per kind and length")
  add("--max-tokens", type=_count, default=128, metavar="N", help="of an answer")
  add("--text", metavar="TEXT", help="file or folder of running text (default: generated)")
  add("--seed", type=_seed, default=0, metavar="N")
  _batch(parser)


def _niah(options: argparse.Namespace) -> Report:
  from train.tasks import needles

  return needles.run(
    _loaded(options),
    kinds=options.kinds or list(needles.KINDS),
    lengths=options.lengths,
    samples=options.samples,
    max_tokens=options.max_tokens,
    source=options.text,
    seed=options.seed,
    batch=options.batch,
  )


TASKS: Sequence[Task] = (
  Task("mqar", "Train on multi-query associative recall.", _mqar, _mqar_options, trains=True),
  Task("lm", "Perplexity and bits per byte of text, by position.", _lm, _lm_options),
  Task(
    "extrapolate",
    "Perplexity in windows of 1 to 32 times the training length.",
    _extrapolate,
    _extrapolate_options,
  ),
  Task("choice", "Multiple choice by log-likelihood.", _choice, _samples_options),
  Task("cloze", "Continuations that greedy generation gives.", _cloze, _samples_options),
  Task("babilong", "Questions about facts in long texts.", _babilong, _babilong_options),
  Task("niah", "Values hidden in generated long texts.", _niah, _niah_options),
)

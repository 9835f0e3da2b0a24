"""Options and runs of `lnssm-train task NAME`. Slow imports are inside."""

import argparse
from typing import Any

from train.scoring import arguments
from train.scoring.arguments import Task
from train.scoring.report import Report


def lm_options(parser: Any) -> None:
  arguments.add_model(parser)
  parser.add_argument(
    "text", nargs="+", metavar="[NAME=]TEXT", help="file, folder or glob; a corpus"
  )
  parser.add_argument(
    "--length", type=arguments.count, metavar="N", help="cut documents to N tokens"
  )
  arguments.add_batch(parser)


def lm(options: argparse.Namespace) -> Report:
  from train.scoring import perplexity

  return perplexity.lm(
    arguments.loaded(options), options.text, length=options.length, batch=options.batch
  )


def extrapolate_options(parser: Any) -> None:
  arguments.add_model(parser)
  add = parser.add_argument
  add("text", metavar="TEXT", help="file, folder or glob")
  add("--train-length", type=arguments.count, metavar="N", help="(default: that of the run)")
  add("--times", type=arguments.count, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N")
  add("--tokens", type=arguments.count, metavar="N", help="read at most so many")
  add("--plot", type=arguments.picture, metavar="FILE", help="draw perplexity by length")
  arguments.add_batch(parser)


def extrapolate(options: argparse.Namespace) -> Report:
  from train.scoring import perplexity

  return perplexity.extrapolate(
    arguments.loaded(options),
    options.text,
    train_length=options.train_length,
    times=options.times,
    tokens=options.tokens,
    batch=options.batch,
  )


def lm_eval_options(parser: Any) -> None:
  arguments.add_model(parser)
  add = parser.add_argument
  add("tasks", nargs="+", metavar="TASK", help="names of tasks")
  add("--include", metavar="FOLDER", help="with .yaml files of more tasks")
  add("--fewshot", type=arguments.whole, metavar="N", help="(default: the task's own number)")
  add("--limit", type=arguments.count, metavar="N", help="only the first N rows of a task")
  arguments.add_batch(parser)


def lm_eval(options: argparse.Namespace) -> Report:
  from train.scoring import harness

  names = ("include", "fewshot", "limit", "batch")
  given = {name: getattr(options, name) for name in names}
  return harness.run(arguments.loaded(options), options.tasks, **given)


def scores_options(parser: Any) -> None:
  _text_options(parser, 256)
  add = parser.add_argument
  add("--plot", type=arguments.picture, metavar="FILE", help="draw maps and log scores")


def scores(options: argparse.Namespace) -> Report:
  from train.scoring import memory

  how = {"length": options.length, "rows": options.rows}
  return memory.scores(arguments.loaded(options), options.text, **how)


def states_options(parser: Any) -> None:
  _text_options(parser, 512)


def states(options: argparse.Namespace) -> Report:
  from train.scoring import memory

  how = {"length": options.length, "rows": options.rows}
  return memory.states(arguments.loaded(options), options.text, **how)


def _text_options(parser: Any, length: int) -> None:
  arguments.add_model(parser)
  add = parser.add_argument
  add("text", metavar="TEXT", help="file, folder or glob")
  add("--length", type=arguments.count, default=length, metavar="N", help="tokens of a document")
  add("--rows", type=arguments.count, default=4, metavar="N", help="documents")


def cost_options(parser: Any) -> None:
  arguments.add_config(parser, required=False)
  add = parser.add_argument
  add("--run-dir", metavar="FOLDER", help="a run of `fit`, instead of --config")
  add("--lengths", type=arguments.count, nargs="+", metavar="N", help="(default: 256 512 1024)")


def cost(options: argparse.Namespace) -> Report:
  from train.cli import commands
  from train.scoring import cost as task

  return task.run(commands.run_config(options).model, options.lengths or task.LENGTHS)


TASKS = (
  Task("lm", "Perplexity and bits per byte of text, by position.", lm, lm_options),
  Task(
    "extrapolate",
    "Perplexity in windows of 1 to 32 times the training length.",
    extrapolate,
    extrapolate_options,
  ),
  Task("lm-eval", "Tasks of the package lm_eval.", lm_eval, lm_eval_options),
  Task("scores", "The law of scores, by layer.", scores, scores_options),
  Task("states", "Rank and reach of states.", states, states_options),
  Task("cost", "FLOPs and memory of generation.", cost, cost_options),
)

"""The tasks of `python -m train task NAME`.

A task that trains takes `--config FILE[:VARIANT]` and `--set`; one that scores takes MODEL, a run
folder or an exported model. Each returns a `Report`.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from train.tasks import scoring_commands as scoring
from train.tasks import training_commands as training
from train.tasks.report import Report


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


def add_parsers(parser: argparse.ArgumentParser) -> None:
  """Adds a parser for each task, whose default `run` prints and writes the report."""
  added_to = parser.add_subparsers(
    dest="task", metavar="NAME", required=True, parser_class=type(parser)
  )
  for task in TASKS:
    added = added_to.add_parser(task.name, help=task.help, description=task.help)
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


TASKS: Sequence[Task] = (
  Task("mqar", "Train on multi-query associative recall.", training.mqar, training.mqar_options),
  Task("listops", "Train on nested expressions.", training.listops, training.listops_options),
  Task("image", "Train on images as pixels.", training.image, training.image_options),
  Task("cost", "FLOPs and memory of generation.", training.cost, training.cost_options),
  Task("lm", "Perplexity and bits per byte of text, by position.", scoring.lm, scoring.lm_options),
  Task(
    "extrapolate",
    "Perplexity in windows of 1 to 32 times the training length.",
    scoring.extrapolate,
    scoring.extrapolate_options,
  ),
  Task("choice", "Multiple choice by log-likelihood.", scoring.choice, scoring.samples_options),
  Task(
    "cloze", "Continuations that greedy generation gives.", scoring.cloze, scoring.samples_options
  ),
  Task(
    "babilong",
    "Questions about facts in long texts.",
    scoring.babilong,
    scoring.babilong_options,
  ),
  Task(
    "babilong-samples",
    "Write samples of BABILong from bAbI and running text.",
    scoring.babilong_samples,
    scoring.babilong_samples_options,
  ),
  Task("recall", "Values named in a text.", scoring.recall, scoring.recall_options),
  Task("rouge", "Answers and summaries by ROUGE-L.", scoring.rouge, scoring.rouge_options),
  Task("lm-eval", "Tasks of the package lm_eval.", scoring.lm_eval, scoring.lm_eval_options),
  Task("scores", "The law of scores, by layer.", scoring.scores, scoring.scores_options),
  Task("states", "Rank and reach of states.", scoring.states, scoring.states_options),
  Task("niah", "Values hidden in generated long texts.", scoring.niah, scoring.niah_options),
)

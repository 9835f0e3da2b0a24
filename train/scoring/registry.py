"""Parsers of the tasks of a command line, and what prints their reports."""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from train.messages import show
from train.scoring.arguments import Task, output


def add_parsers(added_to: Any, tasks: Iterable[Task]) -> None:
  """Adds a parser for each task, whose default `run` prints and writes the report.

  Args:
    added_to: what `ArgumentParser.add_subparsers` returns.
  """
  for task in tasks:
    added = added_to.add_parser(task.name, help=task.help, description=task.help)
    task.add_options(added)
    text = "also write all numbers as JSON"
    added.add_argument("--json", type=output(), metavar="FILE", help=text)
    added.set_defaults(run=_runner(task))


def _runner(task: Task) -> Callable[[argparse.Namespace], None]:
  def run(options: argparse.Namespace) -> None:
    from train.data.errors import writing

    if options.json and getattr(options, "write", None):
      raise ValueError(
        f"--json={options.json} has no numbers to write: --write={options.write} writes data and"
        " does not score; use one of the two."
      )
    report = task.run(options)
    if report is None:
      return
    show(report.text())
    if options.json:
      with writing(options.json):
        report.write(options.json)
    if report.draw and options.plot:
      with writing(options.plot):
        report.draw(options.plot)

  return run

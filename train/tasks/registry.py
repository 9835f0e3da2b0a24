"""The tasks of `python -m train task NAME`: their parsers, and what prints their reports.

Tasks that train a config are in `training_commands`, those that score a model in
`scoring_commands`: options, the call of the task's module, and an entry of `TASKS`.
"""

import argparse
from collections.abc import Callable, Sequence

from train.messages import show
from train.tasks import scoring_commands, training_commands
from train.tasks.arguments import Task, output


def add_parsers(parser: argparse.ArgumentParser) -> None:
  """Adds a parser for each task, whose default `run` prints and writes the report."""
  added_to = parser.add_subparsers(
    dest="task", metavar="NAME", required=True, parser_class=type(parser)
  )
  for task in TASKS:
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


TASKS: Sequence[Task] = (*training_commands.TASKS, *scoring_commands.TASKS)

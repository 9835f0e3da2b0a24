"""The command line `python -m experiments`: the experiments and their options."""

import argparse
from collections.abc import Sequence

import experiments
from experiments import scoring_commands, training_commands
from experiments.vision import commands as vision
from train.cli import program
from train.cli.program import Commands, Parser
from train.scoring import registry

EXAMPLES = """\
  python -m experiments mqar --config experiments/configs/mqar.py:linear
  python -m experiments classify --config experiments/configs/vision.py:vil-digits --dry-run
  python -m experiments evaluate --run-dir runs/vision-vil-digits
  python -m experiments niah runs/quickstart --lengths 256 512
  python -m train sweep experiments/sweeps/mqar_dsf.py --dry-run
"""

TASKS = (*training_commands.TASKS, *scoring_commands.TASKS)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one experiment; returns its exit code, see `train.cli.program.run`."""
  return program.run(parser(), arguments, package=experiments, printing=("evaluate",))


def parser() -> Parser:
  """The parser of all experiments."""
  description = "Train or score on the papers' tasks; `NAME --help` has the options of each."
  added = Commands("python -m experiments", description, EXAMPLES)
  registry.add_parsers(added.added_to, TASKS)
  vision.add_commands(added)
  about = "Print the differences between models that claims.md quotes, with their intervals."
  added.add("verdicts", _verdicts, about)
  return added.parser


def _verdicts(_: argparse.Namespace) -> None:
  from experiments import verdicts  # imports SciPy's statistics

  verdicts.show_all()

"""`python -m train sweep FILE`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from train.sweeps import spec


def add_options(parser: Any) -> None:
  """Adds the options of the command to its parser."""
  add = parser.add_argument
  add("file", metavar="FILE", help="Python file with SWEEP, a list of runs (docs/sweeps.md)")
  set_help = "override a setting of all runs, or of their task: task.pairs=8 (repeatable)"
  add("--set", metavar="A.B=VALUE", action="append", default=[], help=set_help)
  only = "only runs with these values: model=gla,lnssm, lr=1e-3, seed=0 (repeatable)"
  add("--only", metavar="LABEL=VALUE,...", action="append", default=[], help=only)
  add("--out", type=Path, metavar="DIR", help="folder of the runs (default: runs/ and FILE's name)")
  add("--copies", type=int, metavar="N", help="train at most N runs together (default: FILE's)")
  how = parser.add_mutually_exclusive_group()
  how.add_argument(
    "--dry-run", action="store_true", help="print runs, parameters and FLOPs, and exit"
  )
  how.add_argument("--collect", action="store_true", help="write tables of what is finished")


def run(options: argparse.Namespace) -> str | int | None:
  """Runs the command; returns the name of the signal that stopped it, or 1 if a group failed."""
  sweep = spec.load(options.file, folder=options.out, changes=options.set, only=options.only)
  if options.copies is not None and options.copies < 1:
    raise ValueError(f"--copies {options.copies} must be at least 1.")
  copies = options.copies or sweep.copies
  from train.sweeps import plan, plots, tables, training

  if options.dry_run:
    print("\n".join(plan.lines(sweep, copies)))
    return None
  say = lambda line: print(line, flush=True)
  if options.collect:
    outcome = training.collect(sweep)
  else:
    outcome = training.train(sweep, most=copies, say=say)
  sweep.folder.mkdir(parents=True, exist_ok=True)
  rows = tables.write(sweep.folder, sweep.runs, outcome.scores)
  print((sweep.folder / "table.md").read_text(), end="")
  score, _ = tables.primary(sweep.runs[0])
  try:
    plots.draw(rows, sweep.plot, score, sweep.folder / "plot.png")
    say(f"tables and plot  {sweep.folder}/table.md, .csv, .jsonl, runs.jsonl, plot.png")
  except (ImportError, ValueError) as error:
    print(f"no plot: {error}", file=sys.stderr)
    say(f"tables  {sweep.folder}/table.md, .csv, .jsonl, runs.jsonl")
  return outcome.stopped_by or (1 if outcome.failures else None)

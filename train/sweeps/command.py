"""`lnssm-train sweep FILE`."""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

from lnssm_jax.files.atomic import make_folder
from train.cluster.stop_signal import StopSignal
from train.messages import Say, show, warn
from train.sweeps import processes, spec


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
  processes = "start N processes, which share the runs; on a GPU one compiles while another trains"
  add("--processes", type=int, metavar="N", help=processes)
  how = parser.add_mutually_exclusive_group()
  how.add_argument(
    "--dry-run", action="store_true", help="print runs, parameters and FLOPs, and exit"
  )
  how.add_argument("--collect", action="store_true", help="write tables of what is finished")
  how.add_argument("--no-tables", action="store_true", help="only train, and write no tables")


def run(options: argparse.Namespace, stop: StopSignal | None = None) -> str | int | None:
  """Runs the command; returns 1 if a group failed, or the name of the signal that stopped it."""
  processes.end_with_parent()
  sweep = spec.load(options.file, folder=options.out, changes=options.set, only=options.only)
  _check(options)
  copies = options.copies or sweep.copies
  from train.sweeps import plan, training, tuning

  say = functools.partial(show, flush=True)
  if options.dry_run or options.collect or options.processes:
    _leave_accelerators()
  if options.dry_run:
    show("\n".join(plan.lines(sweep, copies)))
    return None
  if options.collect:
    if not any(Path(run.cfg.run_dir).exists() for run in sweep.runs):
      raise ValueError(
        f"--collect: {sweep.folder} has no run of {options.file}; train without --collect, or name"
        " the folder of its runs by --out."
      )
    outcome = training.collect(sweep)
  elif options.processes:
    groups, _ = training.prepare(sweep, tuning.chosen(sweep), say, copies)
    count = min(options.processes, len(groups))
    outcome = training.ended(sweep, *processes.run(_of_one(options), count, say, stop))
    for failure in outcome.failures:
      say(f"failed: {failure}")
  else:
    outcome = training.train(sweep, most=copies, say=say, stop=stop)
  if not options.no_tables:
    _write(sweep, say)
  return 1 if outcome.failures else outcome.stopped_by


def _check(options: argparse.Namespace) -> None:
  """Raises ValueError if options are wrong, or do not go together."""
  copies, processes = options.copies, options.processes
  if copies is not None and copies < 1:
    raise ValueError(f"--copies {copies} must be at least 1.")
  if processes is None:
    return
  if processes < 1:
    raise ValueError(f"--processes {processes} must be at least 1; without it this process trains.")
  if options.dry_run or options.collect:
    other = "--dry-run" if options.dry_run else "--collect"
    raise ValueError(
      f"--processes {processes} says how many processes train, and {other} trains nothing; leave"
      " out one of them."
    )


def _leave_accelerators() -> None:
  """Keeps JAX on the CPU in a process that only counts: others train, and need the memory."""
  import jax

  jax.config.update("jax_platforms", "cpu")


def _of_one(options: argparse.Namespace) -> list[str]:
  """The command of one of several processes."""
  given = [f"--{name}={value}" for name in ("set", "only") for value in getattr(options, name)]
  for name in ("out", "copies"):
    if getattr(options, name) is not None:
      given.append(f"--{name}={getattr(options, name)}")
  return [*_program(), "sweep", options.file, *given, "--no-tables"]


def _program() -> list[str]:
  """How this program was started: by its console script, or as a module."""
  script = Path(sys.argv[0])
  # As a module, `train` would be another one where the working directory has a train.py.
  return [sys.executable, *([str(script)] if script.name == "lnssm-train" else ["-m", "train"])]


def _write(sweep: spec.Sweep, say: Say) -> None:
  """Writes tables and plot of what is finished, and prints the table.

  Again if more is finished then: these may have replaced those of a process that knew of more.
  """
  from train.sweeps import plots, tables, training

  make_folder(sweep.folder)
  finished, error = -1, None
  while (outcome := training.collect(sweep)).finished > finished:
    rows, error = tables.write(sweep.folder, outcome.runs, outcome.scores, sweep.tuning_seed), None
    finished = outcome.finished
    score, _ = spec.primary(sweep.runs[0])
    if any(f"test {score}" in row for row in rows):  # of data that chose nothing
      score = f"test {score}"
    curves = tables.curves(outcome.runs, rows, sweep.tuning_seed)
    try:
      plots.draw(rows, sweep.plot, score, sweep.folder / "plot.png")
      name = tables.curve_score(sweep.runs[0])
      plots.draw_curves(curves, sweep.plot, name, sweep.folder / "curves.png")
    except (ImportError, ValueError) as problem:
      error = problem
  show((sweep.folder / "table.md").read_text(), end="")
  if error is None:
    say(
      f"tables and plots  {sweep.folder}/table.md, .csv, .jsonl, runs.jsonl, .csv, curves.csv,"
      " curves.png, plot.png"
    )
  else:
    warn(f"no plot: {error}")
    say(f"tables  {sweep.folder}/table.md, .csv, .jsonl, runs.jsonl, .csv, curves.csv")

"""Tasks of the command line that train a config: options and runs. Slow imports are inside."""

import argparse
import sys
from pathlib import Path
from typing import Any

from train import config
from train.tasks import arguments
from train.tasks.report import Report


def mqar_options(parser: Any) -> None:
  arguments.add_config(parser)
  add = parser.add_argument
  add("--pairs", type=arguments.count, metavar="N", help="keys with values (default: seq_len / 16)")
  add("--vocab-size", type=arguments.count, metavar="V", help="of the task (default: the model's)")
  add("--power", type=float, default=0.01, metavar="A", help="smaller: queries follow sooner")
  add("--random-fillers", action="store_true", help="random ids, not 0, between the queries")
  add(
    "--learning-rates",
    type=arguments.rate,
    nargs="+",
    metavar="LR",
    help="(default: the published four)",
  )
  add("--seeds", type=arguments.seed, nargs="+", default=[0, 1, 2], metavar="N")
  add("--train-rows", type=arguments.count, default=100_000, metavar="N")
  add("--test-rows", type=arguments.count, default=3_000, metavar="N")
  add("--write", type=Path, metavar="FILE.npz", help="write the data, and do not train")


def mqar(options: argparse.Namespace) -> Report | None:
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


def cost_options(parser: Any) -> None:
  arguments.add_config(parser, required=False)
  add = parser.add_argument
  add("--run-dir", metavar="FOLDER", help="a run of `fit`, instead of --config")
  add("--lengths", type=arguments.count, nargs="+", metavar="N", help="(default: 256 512 1024)")


def cost(options: argparse.Namespace) -> Report:
  from train.cli import commands
  from train.tasks import cost as task

  return task.run(commands.run_config(options).model, options.lengths or task.LENGTHS)

"""Tasks of the command line that train a config: options and runs. Slow imports are inside."""

import argparse
from typing import Any

from train import config
from train.messages import show, warn
from train.scoring import arguments
from train.scoring.arguments import Task
from train.scoring.report import Report


def mqar_options(parser: Any) -> None:
  add = parser.add_argument
  add("--pairs", type=arguments.count, metavar="N", help="keys with values (default: seq_len / 16)")
  add("--vocab-size", type=arguments.count, metavar="V", help="of the task (default: the model's)")
  add("--power", type=float, default=0.01, metavar="A", help="smaller: queries follow sooner")
  add("--random-fillers", action="store_true", help="random ids, not 0, between the queries")
  _training_options(parser, 100_000, 3_000)


def mqar(options: argparse.Namespace) -> Report | None:
  from experiments import mqar_training

  cfg = _config(options)
  task = mqar_training.task_of(
    cfg,
    pairs=options.pairs or max(1, cfg.seq_len // 16),
    vocab_size=options.vocab_size,
    power=options.power,
    random_fillers=options.random_fillers,
  )
  return _train(cfg, task, options)


def listops_options(parser: Any) -> None:
  add = parser.add_argument
  least = "an expression has more tokens (default: 500)"
  add("--min-length", type=arguments.count, default=500, metavar="N", help=least)
  add("--max-length", type=arguments.count, metavar="N", help="and fewer (default: seq_len + 1)")
  add("--max-depth", type=arguments.count, default=10, metavar="N")
  add("--max-args", type=arguments.count, default=10, metavar="N", help="of an operator")
  _training_options(parser, 96_000, 2_000)


def listops(options: argparse.Namespace) -> Report | None:
  from experiments import mqar_training
  from experiments.listops import VOCABULARY, ListOps

  cfg = _config(options)
  mqar_training.check_vocabulary(cfg, VOCABULARY)
  task = ListOps(
    length=cfg.seq_len,
    min_length=options.min_length,
    max_length=options.max_length or cfg.seq_len + 1,
    max_depth=options.max_depth,
    max_args=options.max_args,
  )
  return _train(cfg, task, options)


def image_options(parser: Any) -> None:
  parser.add_argument("images", metavar="TRAIN", help="a folder per class, or FILE.npz:NAME")
  parser.add_argument("test", metavar="TEST", help="likewise")
  _training_options(parser, 1_000_000, 1_000_000)


def image(options: argparse.Namespace) -> Report | None:
  from experiments import mqar_training
  from experiments.pixels import Pixels

  cfg, task = _config(options), Pixels(train=options.images, test=options.test)
  mqar_training.check_vocabulary(cfg, task.vocabulary)
  if cfg.seq_len != task.length:
    raise ValueError(
      f"seq_len={cfg.seq_len} is not the {task.length} pixels of an image; use --set"
      f" seq_len={task.length}."
    )
  return _train(cfg, task, options)


def _training_options(parser: Any, train_rows: int, test_rows: int) -> None:
  arguments.add_config(parser)
  add = parser.add_argument
  rates = {"type": arguments.rate, "nargs": "+", "metavar": "LR"}
  add("--learning-rates", help="(default: the published four)", **rates)
  add("--seeds", type=arguments.seed, nargs="+", default=[0, 1, 2], metavar="N")
  add("--train-rows", type=arguments.count, default=train_rows, metavar="N")
  add("--test-rows", type=arguments.count, default=test_rows, metavar="N")
  add("--data-seed", type=arguments.seed, default=0, metavar="N", help="of the rows (default: 0)")
  text = "write the data, and do not train"
  add("--write", type=arguments.output(".npz"), metavar="FILE.npz", help=text)


def _config(options: argparse.Namespace) -> config.Train:
  return config.apply_overrides(config.load_config(options.config), options.set)


def _train(cfg: config.Train, task: Any, options: argparse.Namespace) -> Report | None:
  """Trains on a task, or writes its rows."""
  from experiments import mqar_training

  rows = {name: getattr(options, name) for name in ("train_rows", "test_rows", "data_seed")}
  if options.write:
    mqar_training.write(task, options.write, **rows)
    show(f"{options.write}  {options.train_rows:,} and {options.test_rows:,} rows")
    return None
  return mqar_training.run(
    cfg,
    task,
    learning_rates=options.learning_rates or mqar_training.LEARNING_RATES,
    seeds=options.seeds,
    progress=warn,
    **rows,
  )


TASKS = (
  Task("mqar", "Train on multi-query associative recall.", mqar, mqar_options),
  Task("listops", "Train on nested expressions.", listops, listops_options),
  Task("image", "Train on images as pixels.", image, image_options),
)

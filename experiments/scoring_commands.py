"""Experiments that score a model: options and runs. Slow imports are inside."""

import argparse
from pathlib import Path
from typing import Any

from experiments import limits
from train.messages import show
from train.scoring import arguments
from train.scoring.arguments import Task
from train.scoring.report import Report


def samples_options(parser: Any) -> None:
  arguments.add_model(parser)
  _add_samples(parser)


def choice(options: argparse.Namespace) -> Report:
  from experiments import choices

  how = {"limit": options.limit, "batch": options.batch}
  return choices.choice(arguments.loaded(options), options.samples, **how)


def cloze(options: argparse.Namespace) -> Report:
  from experiments import choices

  how = {"limit": options.limit, "batch": options.batch}
  return choices.cloze(arguments.loaded(options), options.samples, **how)


def babilong_options(parser: Any) -> None:
  samples_options(parser)
  add = parser.add_argument
  add("--max-tokens", type=arguments.count, default=8, metavar="N", help="of an answer")
  add("--top-p", type=arguments.rate, metavar="P", help="draw answers (default: greedy)")
  add("--seed", type=arguments.seed, default=0, metavar="N", help="of the drawing")
  add("--train-share", type=arguments.share, metavar="P", help="share of the rows to train on")
  add("--split-seed", type=arguments.seed, default=0, metavar="N", help="of that share's rows")
  _add_write(parser)


def babilong(options: argparse.Namespace) -> Report | None:
  from experiments import babilong as task
  from experiments.samples import write_training_rows

  if options.write:
    if options.train_share is None:
      raise ValueError("--write writes the rows of --train-share P; give it too, such as 0.05.")
    how = {"split_seed": options.split_seed, "limit": options.limit}
    found = task.training_rows(options.samples, options.train_share, **how)
    show(f"{options.write}  {write_training_rows(options.write, found):,} rows to train on")
    return None
  return task.run(
    arguments.loaded(options),
    options.samples,
    max_tokens=options.max_tokens,
    top_p=options.top_p,
    seed=options.seed,
    train_share=options.train_share,
    split_seed=options.split_seed,
    limit=options.limit,
    batch=options.batch,
  )


def babilong_samples_options(parser: Any) -> None:
  add = parser.add_argument
  add("babi", metavar="BABI", help="folder of bAbI's text files")
  add("text", metavar="TEXT", help="file, folder or glob of running text")
  add("--tokenizer", required=True, metavar="SPEC", help="'bytes' or a tokenizer.json: of lengths")
  add("--write", type=Path, required=True, metavar="FOLDER", help="of the .jsonl files")
  add("--tasks", nargs="+", default=[f"qa{n}" for n in range(1, 6)], metavar="TASK")
  add(
    "--lengths",
    type=arguments.whole,
    nargs="+",
    default=[0, 1000, 2000, 4000, 8000],
    metavar="N",
    help="tokens of a prompt; 0: no running text",
  )
  add("--samples", type=arguments.count, default=100, metavar="N", help="per task and length")
  add("--split", default="test", metavar="NAME", help="files whose names end so (default: test)")
  add("--seed", type=arguments.seed, default=0, metavar="N")


def babilong_samples(options: argparse.Namespace) -> None:
  from experiments import babilong_samples as task
  from train.data.tokenizers import load_tokenizer

  names = ("babi", "text", "tasks", "lengths", "samples", "split", "seed")
  written = task.write(
    options.write,
    tokenizer=load_tokenizer(options.tokenizer),
    **{name: getattr(options, name) for name in names},
  )
  for path, rows in written:
    show(f"{path}  {rows:,} rows")


def niah_options(parser: Any) -> None:
  arguments.add_model(parser)
  add = parser.add_argument
  add("--kinds", nargs="+", metavar="KIND", help="(default: all six)")
  add("--lengths", type=arguments.count, nargs="+", required=True, metavar="N", help="in tokens")
  add("--samples", type=arguments.count, default=100, metavar="N", help="per kind and length")
  add("--max-tokens", type=arguments.count, default=128, metavar="N", help="of an answer")
  add("--text", metavar="TEXT", help="file or folder of running text (default: generated)")
  add("--seed", type=arguments.seed, default=0, metavar="N")
  arguments.add_batch(parser)


def niah(options: argparse.Namespace) -> Report:
  from experiments import needles

  kinds = options.kinds or list(needles.KINDS)
  for kind in kinds:
    limits.kind_of(kind, needles.KINDS)  # before the model, and the kinds before it are scored
  limits.check_prompts("--lengths", options.lengths, options.samples)
  return needles.run(
    arguments.loaded(options),
    kinds=kinds,
    lengths=options.lengths,
    samples=options.samples,
    max_tokens=options.max_tokens,
    source=options.text,
    seed=options.seed,
    batch=options.batch,
  )


def recall_options(parser: Any) -> None:
  samples_options(parser)
  add = parser.add_argument
  add("--twice", action="store_true", help="a prompt that has the text twice")
  add("--max-tokens", type=arguments.count, default=48, metavar="N", help="of an answer")
  add("--length", type=arguments.count, metavar="N", help="leave out prompts of more tokens")


def recall(options: argparse.Namespace) -> Report:
  from experiments import recall as task

  return task.run(
    arguments.loaded(options),
    options.samples,
    twice=options.twice,
    max_tokens=options.max_tokens,
    length=options.length,
    limit=options.limit,
    batch=options.batch,
  )


def rouge_options(parser: Any) -> None:
  arguments.add_model(parser)
  _add_samples(parser)
  add = parser.add_argument
  add("--kind", required=True, metavar="KIND", help="asqa, eli5, wikilarge or scitldr")
  add("--max-tokens", type=arguments.count, default=100, metavar="N", help="of an answer")
  _add_write(parser)


def rouge(options: argparse.Namespace) -> Report | None:
  from experiments import rouge as task
  from experiments.samples import write_training_rows

  if options.write:
    found = task.training_rows(options.kind, options.samples, options.limit)
    show(f"{options.write}  {write_training_rows(options.write, found):,} rows to train on")
    return None
  limits.kind_of(options.kind, task.KINDS)  # before the model is loaded
  return task.run(
    arguments.loaded(options),
    options.kind,
    options.samples,
    max_tokens=options.max_tokens,
    limit=options.limit,
    batch=options.batch,
  )


def _add_write(parser: Any) -> None:
  """--write."""
  text = "write rows to train on, {prompt, completion}, and do not score"
  parser.add_argument("--write", type=arguments.output(".jsonl"), metavar="FILE.jsonl", help=text)


def _add_samples(parser: Any) -> None:
  """SAMPLES, --limit and --batch."""
  add = parser.add_argument
  add("samples", nargs="+", metavar="SAMPLES", help=".jsonl or .jsonl.xz file, or a folder of such")
  add("--limit", type=arguments.count, metavar="N", help="only the first N rows of a file")
  arguments.add_batch(parser)


TASKS = (
  Task("choice", "Multiple choice by log-likelihood.", choice, samples_options),
  Task("cloze", "Continuations that greedy generation gives.", cloze, samples_options),
  Task(
    "babilong",
    "Questions about facts in long texts.",
    babilong,
    babilong_options,
  ),
  Task(
    "babilong-samples",
    "Write samples of BABILong from bAbI and running text.",
    babilong_samples,
    babilong_samples_options,
  ),
  Task("recall", "Values named in a text.", recall, recall_options),
  Task("rouge", "Answers and summaries by ROUGE-L.", rouge, rouge_options),
  Task("niah", "Values hidden in generated long texts.", niah, niah_options),
)

"""SSE and MoM next to GLA, trained on text: bits per byte, and the share of each partition.

    python -m train tokenize --config configs/lnssm_72m_books.py --set data.tokenizer=bytes \
      --set data.folder=FOLDER
    python -m experiments.sparse_training --data FOLDER \
      --out experiments/results/sparse_training.csv
    python -m experiments.sparse_training --out experiments/results/sparse_training.csv \
      --plot experiments/results/sse.png

FOLDER holds the token files train_books and val_books, val_peps, val_openwebtext as bytes. Without
it nothing is trained, and the rows of `--out` are drawn.

6 layers of 512, SwiGLU of 1,408, about 20M parameters, rows of 1,024 bytes; each mixer with three
seeds and one learning rate, on the same batches. The copies that differ in seed are one program
(`train.step.copies`). Written per copy, then the mean and the standard deviation over seeds.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import csv_rows, turns
from experiments import over_seeds
from lnssm_jax.files.buckets import local
from train import loop
from train.config import Data, Model, Optimizer, Train
from train.data.windows import TokenWindows, eval_batches, train_batches
from train.scoring import arguments as task_arguments
from train.step.copies import Copies
from train.sweeps import Plot
from train.trainer import training_set

SEEDS = (0, 1, 2)
LEARNING_RATE = 1e-3
VALIDATION = ("val_books", "val_peps", "val_openwebtext")
MIXERS: dict[str, dict[str, Any]] = {  # 4 partitions or memories, and one that is always on
  "gla": {},
  "sse": {"num_partitions": 4},
  "mom": {"num_memories": 4, "num_selected": 1},
}
FIELDS = ("mixer", "seed", "learning_rate", "parameters", "score", "of", "share", "note")


class Sizes(NamedTuple):
  """The model and the run."""

  dim: int = 512
  num_layers: int = 6
  num_heads: int = 4
  channel_hidden: int = 1408
  length: int = 1024
  rows: int = 32
  steps: int = 1000

  @classmethod
  def parse(cls, changes: Sequence[str]) -> "Sizes":
    """`["rows=2", "length=64"]`: the default sizes but for these.

    Raises:
      ValueError: a name is unknown, or a value is no number of at least 1.
    """
    found = {}
    for change in changes:
      name, _, number = change.partition("=")
      if name not in cls._fields:
        raise ValueError(f"{change!r} sets no known size; use one of {', '.join(cls._fields)}.")
      try:
        found[name] = task_arguments.count(number)
      except (ValueError, argparse.ArgumentTypeError):
        raise ValueError(
          f"{change!r} must set a whole number of at least 1, such as {name}=10."
        ) from None
    return cls(**found)


def settings(mixer: str, sizes: Sizes, folder: str) -> Train:
  """The run of a mixer; the seed is that of the copies."""
  return Train(
    model=Model(
      mixer=mixer,
      mixer_options=MIXERS[mixer],
      dim=sizes.dim,
      num_layers=sizes.num_layers,
      num_heads=sizes.num_heads,
      vocab_size=257,
      channel_mixer="swiglu",
      channel_hidden=sizes.channel_hidden,
      norm="rms",
      embedding_norm=False,
    ),
    optimizer=Optimizer(
      peak_lr=LEARNING_RATE,
      final_lr=0.0,
      schedule="cosine",
      warmup_steps=sizes.steps // 20,
      b1=0.9,
      b2=0.95,
      weight_decay=0.1,
      clip_norm=1.0,
    ),
    data=Data(folder=folder, tokenizer="bytes", train=("train_books",), validation=VALIDATION),
    run_dir="-",
    seq_len=sizes.length,
    global_batch=sizes.rows,
    steps=sizes.steps,
    eval_every=sizes.steps,
    checkpoint_every=sizes.steps,
  )


def validation(cfg: Train, name: str):
  """The batches of a validation set."""
  source = TokenWindows(local(cfg.data.folder) / name, cfg.seq_len, cfg.model.vocab_size)
  return eval_batches(source, cfg.global_batch)


def bits_per_byte(copies: Copies, name: str, most: int = 32) -> np.ndarray:
  """[R], on at most `most` batches of a set."""
  batches = itertools.islice(validation(copies.cfg, name), most)
  sums = [jax.device_get(copies.loss(batch)) for batch in batches]
  nats, weight = (np.sum([getattr(x, name) for x in sums], axis=0) for name in ("nats", "weight"))
  return nats / weight / math.log(2)


def prepare(mixer: str, sizes: Sizes, folder: str) -> Copies:
  """The copies of a mixer, their training step compiled."""
  cfg = settings(mixer, sizes, folder)
  copies = Copies(cfg, seeds=SEEDS, learning_rates=(LEARNING_RATE,))
  copies.compile(next(validation(cfg, VALIDATION[0])))
  return copies


def measure(mixer: str, copies: Copies) -> list[dict[str, Any]]:
  """Trains; a row per copy and test set."""
  cfg, now, begin = copies.cfg, loop.Moment(0, copies.state), time.time()
  with train_batches(training_set(cfg), seed=0, global_batch=cfg.global_batch) as batches:
    loop.train(now, copies.advance, batches, steps=cfg.steps)
  losses = np.asarray(now.metrics["loss"])
  shares = [
    np.asarray(aux.share) for aux in now.metrics.get("aux", []) if aux is not None
  ]  # [layers][R][P]
  seconds = time.time() - begin
  parameters = sum(x.size for x in jax.tree.leaves(copies.params)) // len(copies.runs)
  rows = []
  for name in copies.cfg.data.validation:
    values = bits_per_byte(copies, name)
    for copy, (seed, rate) in enumerate(copies.runs):
      rows.append({
        "mixer": mixer,
        "seed": seed,
        "learning_rate": rate,
        "parameters": parameters,
        "score": f"{values[copy]:.4f}",
        "of": name,
        "share": " | ".join(" ".join(f"{x:.2f}" for x in layer[copy]) for layer in shares),
        "note": f"training loss {losses[copy]:.4f}; {seconds:.0f} s for {len(copies.runs)} copies",
      })  # fmt: skip
  return rows


def run(args) -> list[dict[str, Any]]:
  """Trains each mixer in a process of its own, printing rows as they come."""
  command = [sys.executable, "-m", "experiments.sparse_training", "--data", args.data]
  command += ["--set", *args.set] if args.set else []
  rows = []
  measured = turns.take([[*command, "--one", mixer] for mixer in MIXERS])
  for mixer, result in zip(MIXERS, measured, strict=True):
    for row in result.get("rows", [{"mixer": mixer, **result}]):
      rows.append({field: row.get(field, "") for field in FIELDS})
      print("  ".join(map(str, rows[-1].values())), flush=True)
    if args.out:
      csv_rows.write(args.out, FIELDS, rows)  # at once: a later failure loses nothing
  return rows


def main(arguments=None) -> list[dict[str, Any]]:
  """Trains all, or reads what was measured, and draws it; returns the rows."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--data", help="folder of token files")
  parser.add_argument("--set", nargs="+", default=[], metavar="steps=10", help="other sizes")
  parser.add_argument("--out", type=Path, help="a CSV file; without --data, one to read")
  parser.add_argument("--plot", type=task_arguments.picture, help="draw bits per byte")
  parser.add_argument("--one", help=argparse.SUPPRESS)
  args = parser.parse_args(arguments)
  try:
    sizes = Sizes.parse(args.set)
  except ValueError as error:
    parser.error(f"argument --set: {error}")
  if args.one:
    copies = prepare(args.one, sizes, args.data)
    turns.wait()
    rows = measure(args.one, copies)
    print(json.dumps({"rows": rows}), flush=True)
    return rows
  if args.data:
    rows = run(args)
  elif args.out and args.out.exists():
    rows = csv_rows.read(args.out, without=(), column="mixer")
    if other := {name for row in rows for name in row} ^ set(FIELDS):
      names = ", ".join(sorted(map(str, other)))
      parser.error(f"{args.out} is of another version, which differs in {names}; measure again.")
  else:
    parser.error("training needs --data, the folder of token files; or read rows with --out.")
  found = over_seeds.summary(rows, ("of", "mixer", "parameters"), "score")
  for row in found:
    print(f"{row['of']}  {row['mixer']}: {over_seeds.text(row)} ({row['seeds']} seeds)")
  if args.plot:
    found = [row | {"text:": row["of"].removeprefix("val_")} for row in found]
    plot = Plot(x="mixer", panel="text:")
    over_seeds.draw(found, plot, "bits per byte", args.plot, share_y=False)
  return rows


if __name__ == "__main__":
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  main()

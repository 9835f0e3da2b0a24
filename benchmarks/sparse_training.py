"""SSE and MoM next to GLA, trained: language modelling, recall at equal state size, routing.

    python -m train tokenize --config configs/lnssm_72m_books.py --set data.tokenizer=bytes \
      --set data.folder=FOLDER
    python -m benchmarks.sparse_training --data FOLDER --out docs/sparse_training.csv
    python -m benchmarks.sparse_training --only recall           # needs no data

FOLDER holds the token files train_books and val_books, val_peps, val_openwebtext as bytes.

"lm": 6 layers of 512, SwiGLU of 1,408, about 20M parameters, rows of 1,024 bytes; each mixer with
three seeds and one learning rate, on the same batches. "recall": multi-query associative recall as
`train.tasks.mqar_training` trains it, 64 pairs in 256 tokens of a vocabulary of 512; a layer of
`base_conv`, without which none learns it in these steps, and one of the mixer, 64 wide with SwiGLU;
the best of three learning rates for the mean of three seeds. States of a head: GLA 32 x 32, or as
many rows as the five partitions of SSE and the five memories of MoM have together, 160 x 32.

The copies that differ in seed and learning rate are one program (`train.tasks.copies`). Written per
copy, then the mean and the standard deviation over seeds.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import csv_rows, turns
from train.config import Data, Model, Optimizer, Train
from train.data.windows import TokenWindows, eval_batches, train_batches
from train.tasks.copies import Copies
from train.tasks.mqar_training import Training, task_of

SEEDS = (0, 1, 2)
RATES = {"lm": (1e-3,), "recall": (1e-3, 2.2e-3, 4.6e-3)}
VALIDATION = ("val_books", "val_peps", "val_openwebtext")
PARTITIONS = 4  # and one that is always on
MIXERS = {
  "lm": {
    "gla": ("gla", {}),
    "sse": ("sse", {"num_partitions": PARTITIONS}),
    "mom": ("mom", {"num_memories": PARTITIONS, "num_selected": 1}),
  },
  "recall": {
    "gla": ("gla", {"expand_k": 1.0}),
    "gla, as many rows": ("gla", {"expand_k": PARTITIONS + 1.0}),
    "sse": ("sse", {"num_partitions": PARTITIONS}),
    "mom": ("mom", {"num_memories": PARTITIONS, "num_selected": 1}),
  },
}
FIELDS = ("task", "mixer", "seed", "learning_rate", "parameters", "score", "of", "share", "note")


class Sizes(NamedTuple):
  """A task's model and run."""

  dim: int
  num_layers: int
  num_heads: int
  channel_hidden: int
  vocab_size: int
  length: int
  rows: int
  steps: int
  pairs: int = 0
  tests: int = 0  # rows of the test set


SIZES = {
  "lm": Sizes(512, 6, 4, 1408, 257, 1024, 32, 1000),
  "recall": Sizes(64, 2, 2, 128, 512, 256, 256, 6000, pairs=64, tests=3072),
}
EXAMPLES = 100_000  # of the training set of recall


def settings(task: str, mixer: str, sizes: Sizes, folder: str) -> Train:
  """The run of a mixer; the learning rate is that of the copies."""
  name, options = MIXERS[task][mixer]
  return Train(
    model=Model(
      mixer=name if task == "lm" else ("base_conv", name),
      mixer_options=options if task == "lm" else {name: options},
      dim=sizes.dim,
      num_layers=sizes.num_layers,
      num_heads=sizes.num_heads,
      vocab_size=sizes.vocab_size,
      channel_mixer="swiglu",
      channel_hidden=sizes.channel_hidden,
      norm="rms",
      embedding_norm=False,
      tie_embeddings=task == "recall",
    ),
    optimizer=Optimizer(
      peak_lr=1e-3,
      final_lr=0.0,
      schedule="cosine",
      warmup_steps=sizes.steps // 20,
      b1=0.9,
      b2=0.95,
      weight_decay=0.1,
      clip_norm=1.0,
    ),
    data=Data(
      folder=folder or "-", tokenizer="bytes", train=("train_books",), validation=VALIDATION
    ),
    run_dir="-",
    seq_len=sizes.length,
    global_batch=sizes.rows,
    steps=sizes.steps,
    eval_every=sizes.steps,
    checkpoint_every=sizes.steps,
  )


def text_batches(cfg: Train):
  """Batches of text for all steps."""
  source = TokenWindows(
    Path(cfg.data.folder) / cfg.data.train[0], cfg.seq_len, cfg.model.vocab_size
  )
  with train_batches(source, seed=0, global_batch=cfg.global_batch) as batches:
    for _ in range(cfg.steps):
      yield next(batches)


def validation(cfg: Train, name: str):
  """The batches of a validation set."""
  source = TokenWindows(Path(cfg.data.folder) / name, cfg.seq_len, cfg.model.vocab_size)
  return eval_batches(source, cfg.global_batch)


def bits_per_byte(copies: Copies, name: str, most: int = 32) -> np.ndarray:
  """[R], on at most `most` batches of a set."""
  batches = itertools.islice(validation(copies.cfg, name), most)
  sums = [jax.device_get(copies.loss(batch)) for batch in batches]
  return sum(s.nats for s in sums) / sum(s.weight for s in sums) / math.log(2)


class Prepared(NamedTuple):
  """The copies of a mixer, their training step compiled, and the task of recall."""

  copies: Copies
  recall: Training | None


def prepare(task: str, mixer: str, sizes: Sizes, folder: str) -> Prepared:
  """Compiles what is trained."""
  cfg = settings(task, mixer, sizes, folder)
  copies = Copies(cfg, seeds=SEEDS, learning_rates=RATES[task])
  if task == "lm":
    copies.compile(next(validation(cfg, VALIDATION[0])))
    return Prepared(copies, None)
  rows = {"train_rows": EXAMPLES, "test_rows": sizes.tests}
  training = Training(cfg, task_of(cfg, pairs=sizes.pairs), copies, **rows)
  copies.compile(training.train[0]._asdict())
  return Prepared(copies, training)


def measure(task: str, mixer: str, prepared: Prepared) -> list[dict[str, Any]]:
  """Trains; a row per copy and test set."""
  copies, recall = prepared
  begin = time.time()
  if recall is None:
    for batch in text_batches(copies.cfg):
      metrics = copies.step(batch)
  else:
    while not recall.finished:
      recall.advance()
    metrics = recall.metrics
  losses = np.asarray(metrics["loss"])
  shares = [
    np.asarray(aux.share) for aux in metrics.get("aux", []) if aux is not None
  ]  # [layers][R][P]
  seconds = time.time() - begin
  if recall is None:
    scores = {name: bits_per_byte(copies, name) for name in copies.cfg.data.validation}
  else:
    scores = {"accuracy": recall.accuracy}
  parameters = sum(x.size for x in jax.tree.leaves(copies.params)) // len(copies.runs)
  rows = []
  for name, values in scores.items():
    for copy, (seed, rate) in enumerate(copies.runs):
      rows.append({
        "task": task,
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


def summary(rows: list[dict[str, Any]]) -> str:
  """Mean and standard deviation over seeds; of recall, at the best learning rate."""
  groups: dict[tuple, list[float]] = {}
  for row in rows:
    if not row["score"]:
      continue
    key = (row["task"], row["of"], row["mixer"], float(row["learning_rate"]))
    groups.setdefault(key, []).append(float(row["score"]))
  best: dict[tuple, tuple] = {}
  for key, scores in groups.items():
    better = key[:3] not in best or np.mean(scores) > np.mean(groups[best[key[:3]]])
    if better:
      best[key[:3]] = key
  lines = []
  for (task, name, mixer), key in best.items():
    scores = groups[key]
    spread = np.std(scores, ddof=1) if len(scores) > 1 else 0.0
    lines.append(
      f"{task}  {name}  {mixer}: {np.mean(scores):.4f} +- {spread:.4f} ({len(scores)} seeds,"
      f" learning rate {key[3]:g})"
    )
  return "\n".join(lines)


def _words(name: str, args) -> list[str]:
  value = getattr(args, name)
  return [f"--{name}", *([value] if isinstance(value, str) else value)]


def main(arguments=None) -> list[dict[str, Any]]:
  """Trains all, printing rows as they come; returns them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", nargs="+", choices=list(SIZES), default=list(SIZES))
  parser.add_argument("--data", default="", help="folder of token files, for lm")
  parser.add_argument("--set", nargs="+", default=[], metavar="steps=10", help="other sizes")
  parser.add_argument("--out", type=Path, help="a CSV file")
  parser.add_argument("--one", help=argparse.SUPPRESS)
  args = parser.parse_args(arguments)
  if "lm" in args.only and not args.data:
    parser.error("lm needs --data, the folder of token files; or use --only recall.")
  changes = {name: int(value) for name, value in (pair.split("=") for pair in args.set)}
  if args.one:
    (task,) = args.only
    sizes = SIZES[task]._replace(**changes)
    prepared = prepare(task, args.one, sizes, args.data)
    turns.wait()
    rows = measure(task, args.one, prepared)
    print(json.dumps({"rows": rows}), flush=True)
    return rows
  wanted = [(task, mixer) for task in args.only for mixer in MIXERS[task]]
  same = [word for name in ("data", "set") if getattr(args, name) for word in _words(name, args)]
  command = [sys.executable, "-m", "benchmarks.sparse_training", *same]
  measured = turns.take([[*command, "--only", task, "--one", mixer] for task, mixer in wanted])
  rows = []
  for (task, mixer), result in zip(wanted, measured, strict=True):
    for row in result.get("rows", [{"task": task, "mixer": mixer, **result}]):
      rows.append({field: row.get(field, "") for field in FIELDS})
      print("  ".join(map(str, rows[-1].values())), flush=True)
    if args.out:
      csv_rows.write(args.out, FIELDS, rows)  # at once: a later failure loses nothing
  print(summary(rows))
  return rows


if __name__ == "__main__":
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  main()

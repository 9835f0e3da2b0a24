"""Recall of the mixers that Longhorn's paper compares, in the published protocol of Zoology.

    python -m train sweep experiments/sweeps/mqar_published.py

Multi-query associative recall of 4 pairs in 64 tokens of a vocabulary of 8,192, in two layers of
one mixer without a convolution before it, 64 wide: batches of 512 of 100,000 rows, at most 64
epochs, until all seeds of a rate are above 0.99 on rows that are not those of the result. Softmax
attention is the positive control: where it fails, the task decides nothing. Seed 0 tries three
rates and more at an edge; the result is of seeds 1 to 3 at its best.

Differences from the paper: 64 wide only, and the smallest of its four tasks
(`mqar_published_longer.py` has more); one seed chooses the rate; the cosine falls per step;
products are in bfloat16, for which the scans have kernels.
Measured: 4 pairs in 64 tokens (experiments/results/recall_published.md): attention, Longhorn and
Mamba solve them in 3 of 3 runs, RWKV-4, Based and Hyena have 0.81 to 0.88, BaseConv a guess.
"""

import dataclasses
from pathlib import Path
from typing import Any

from experiments.recall_sweep import Recall
from experiments.small_runs import COLORS
from experiments.sweeps.mqar_longhorn import MODELS
from train.config import Train, load_config
from train.sweeps import Plot, grid

WIDTH, EPOCHS, ROWS, VOCABULARY = 64, 64, 100_000, 8192
TASKS = {64: (4, 512), 128: (8, 256), 256: (16, 128)}  # {length: (pairs, rows of a batch)}
POSITIONS = {"attention": 512}  # a table, as in Zoology; the others have none


def make(model: str, length: int) -> tuple[Train, Recall]:
  """Two layers of a mixer of Longhorn (Liu et al. 2024), figure 4, as Zoology's code trains it."""
  mixer, options = MODELS[model]
  if mixer in ("hyena", "base_conv"):
    options = {**options, "max_length": length}
  pairs, batch = TASKS[length]
  cfg = load_config(Path(__file__).parents[1] / "configs" / "mqar.py:linear")
  changes: dict[str, Any] = {"mixer": mixer, "mixer_options": options, "dim": WIDTH}
  changes |= {"vocab_size": VOCABULARY, "channel_mixer": "none", "channel_mixer_options": {}}
  changes |= {"dtype": "bfloat16", "learned_positions": POSITIONS.get(model)}
  cfg = dataclasses.replace(
    cfg,
    model=dataclasses.replace(cfg.model, **changes),
    seq_len=length,
    global_batch=batch,
    steps=EPOCHS * (ROWS // batch),
  )
  task = Recall(pairs=pairs, train_rows=ROWS, validation_rows=3_000, vocab_size=VOCABULARY)
  return cfg, task


SWEEP = grid(
  make,
  {"model": MODELS, "length": (64,)},
  learning_rates=(1e-4, 4.6e-4, 2.2e-3, 1e-2, 4.6e-2),
  seeds=range(4),
  folder="{model}-t{length}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="model", colors=COLORS, panel="length", chance={64: 1 / 4})
TUNING_SEED, FIRST_RATES = 0, (4.6e-4, 2.2e-3, 1e-2)
COPIES = 3

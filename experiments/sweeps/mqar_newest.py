"""Recall of the newest mixers next to GLA, gated DeltaNet and Mamba-2, in the published protocol.

    python -m train sweep experiments/sweeps/mqar_newest.py

The tasks, sizes and stops of `mqar_published.py`, whose softmax attention is the positive control
here, too: 4 pairs in 64 tokens and 8 in 128, a vocabulary of 8,192, two layers of one mixer 64 wide
with one head and without a convolution before it, at most 64 epochs of 100,000 rows. Some of the
mixers have short convolutions of their own. Seed 0 tries three rates until one solves the task, and
more while the best is at an edge; the result is of seeds 1 to 3 at its best.
Measured: ten models with 4 pairs in 64 tokens (experiments/results/recall_published.md): all but
GLA solve them in 3 of 3 runs, most within 195 steps.
"""

import dataclasses

from experiments.recall_sweep import Recall
from experiments.small_runs import COLORS, NEWEST
from experiments.sweeps import mqar_published as published
from train.config import Train
from train.sweeps import Plot, grid

MODELS = {name: options for name, options in NEWEST.items() if name != "softmax_attention"}
LENGTHS = (64, 128)
MODELS["log_linear"] = {"max_length": max(LENGTHS)}


def make(model: str, length: int) -> tuple[Train, Recall]:
  """Longhorn's model of `mqar_published.py` with another mixer."""
  cfg, task = published.make("longhorn", length)
  changes = {"mixer": model, "mixer_options": MODELS[model]}
  return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **changes)), task


SWEEP = grid(
  make,
  {"model": MODELS, "length": LENGTHS},
  learning_rates=(1e-4, 4.6e-4, 2.2e-3, 1e-2, 4.6e-2),
  seeds=range(4),
  folder="{model}-t{length}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="model", colors=COLORS, panel="length", chance={64: 1 / 4, 128: 1 / 8})
TUNING_SEED, FIRST_RATES = 0, (4.6e-4, 2.2e-3, 1e-2)
COPIES = 3

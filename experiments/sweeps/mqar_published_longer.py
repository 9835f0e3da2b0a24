"""Recall in the published protocol of Zoology with more pairs in longer rows.

    python -m train sweep experiments/sweeps/mqar_published_longer.py --only length=128

As `mqar_published.py`: 8 pairs in 128 tokens in batches of 256, 16 in 256 in batches of 128. All
seeds train at all rates, of which the best mean on the rows for validation counts; a rate's three
seeds are a group, so that `--only lr=0.01` begins with the rate that was best of 4 pairs in 64
tokens for most models (2.2e-3 for Based).
Measured: 8 pairs in 128 tokens, attention at three rates and five models at one
(experiments/results/recall_published.md): attention, Longhorn and Mamba solve them in 3 of 3 runs.
"""

from experiments.small_runs import COLORS
from experiments.sweeps import mqar_published as published
from train.sweeps import Plot, grid

LENGTHS = (128, 256)

SWEEP = grid(
  published.make,
  {"model": published.MODELS, "length": LENGTHS},
  learning_rates=(4.6e-4, 2.2e-3, 1e-2),
  seeds=range(3),
  folder="{model}-t{length}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(
  x="model",
  colors=COLORS,
  panel="length",
  chance={length: 1 / published.TASKS[length][0] for length in LENGTHS},
)
COPIES = 3

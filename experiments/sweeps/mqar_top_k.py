"""Recall of GLA, MetaLA and GSA, dense and with a quarter of their rows selected per token.

    python -m train sweep experiments/sweeps/mqar_top_k.py

Multi-query associative recall of 16 pairs in 128 tokens of a vocabulary of 256, 2 heads, states of
as many rows per head as it has columns, in 4,000 steps of 64 rows: 32.8M tokens per run. Fillers
are zeros (the SSE paper's setting 1) or random ids (setting 2).

Differences from the paper, beyond the size of the task: as in `mqar_dsf.py`, the first of two
layers is a `base_conv`, there is no MLP, kernels start at the scale of their inputs, with a norm
after the embedding and a head that is not tied to it, and there is a warmup, bfloat16 and no
dropout.
Measured: all 216 runs (experiments/results/recall.md): with a quarter of its rows GLA has 0.99 to
1.00, with all 0.52 to 0.99; GSA 0.60 to 0.99, with all 0.07 to 0.39; MetaLA has 0.99 with all in
three of four cases.
"""

from pathlib import Path

from experiments.recall_sweep import Recall
from experiments.small_runs import COLORS, behind_base_conv
from train.config import Train, load_config
from train.sweeps import Plot, grid

LENGTH, PAIRS, BATCH, STEPS, ROWS, VOCABULARY = 128, 16, 64, 4000, 64_000, 256
DTYPE = "bfloat16"  # of the products, for which the scans have kernels
HEADS = 2
LEARNING_RATES, SEEDS = (1e-3, 3e-3, 1e-2), (0, 1, 2)


def make(model: str, rows: str, width: int, fillers: str) -> tuple[Train, Recall]:
  """A model of SSE (Pan et al. 2025), section 3: row-sparse linear attention."""
  size = width // HEADS
  options = {"num_slots": size} if model == "gsa" else {"expand_k": 1.0}
  if rows == "top quarter":
    options["selected_rows"] = size // 4
  cfg = load_config(Path(__file__).parents[1] / "configs" / "mqar.py:linear")
  sizes = {"vocab_size": VOCABULARY, "length": LENGTH, "batch": BATCH, "steps": STEPS}
  random_fillers = fillers == "random"
  task = Recall(pairs=PAIRS, train_rows=ROWS, vocab_size=VOCABULARY, random_fillers=random_fillers)
  return behind_base_conv(
    cfg, model, options, **sizes, dtype=DTYPE, dim=width, num_heads=HEADS
  ), task


SWEEP = grid(
  make,
  {
    "model": ("gla", "metala", "gsa"),
    "rows": ("all", "top quarter"),
    "width": (64, 128),
    "fillers": ("zeros", "random"),
  },
  learning_rates=LEARNING_RATES,
  seeds=SEEDS,
  folder="{model}-{rows}-d{width}-{fillers}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(
  x="rows", colors=COLORS, line="model", panel="width", chance=dict.fromkeys((64, 128), 1 / PAIRS)
)

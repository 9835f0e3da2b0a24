"""Recall by width and size of the state: GLA, SSE and MoM with states of equal size.

    python -m train sweep experiments/sweeps/mqar_states.py

Multi-query associative recall of 16 pairs in 128 tokens of a vocabulary of 256, in 4,000 steps of
64 rows: 32.8M tokens per run. Heads have 32 columns; a head's state has `rows` rows: those of GLA's
keys, or of all partitions of SSE and all memories of MoM, 32 each, of which one is always on and a
token uses one other. As in `mqar_dsf.py`, the first of two layers is a `base_conv`, there is no
MLP, kernels start at the scale of their inputs, with a norm after the embedding and a head that is
not tied to it, and there is a warmup, bfloat16 and no dropout.
Measured: all 126 runs in 5 min 56 s of one H100 (experiments/results/recall.md): SSE has 0.994 to
0.999, MoM 0.76 to 0.98, GLA 0.66 to 0.96.
"""

from pathlib import Path
from typing import Any

from experiments.recall_sweep import Recall
from experiments.small_runs import COLORS, behind_base_conv
from train.config import Train, load_config
from train.sweeps import Plot, grid

LENGTH, PAIRS, BATCH, STEPS, VOCABULARY = 128, 16, 64, 4000, 256
DTYPE = "bfloat16"  # of the products, for which the scans have kernels
COLUMNS = 32
TASK = Recall(pairs=PAIRS, train_rows=64_000, vocab_size=VOCABULARY)
LEARNING_RATES, SEEDS = (1e-3, 3e-3, 1e-2), (0, 1, 2)


def make(model: str, width: int, rows: int) -> Train | None:
  """A model with a state of `rows` rows per head; one of 32 rows has no partitions."""
  parts = rows // COLUMNS
  options: dict[str, Any] = {
    "gla": {"expand_k": float(parts)},
    "sse": {"num_partitions": parts - 1},
    "mom": {"num_memories": parts - 1, "num_selected": 1},
  }[model]
  if parts == 1 and model != "gla":
    return None
  cfg = load_config(Path(__file__).parents[1] / "configs" / "mqar.py:linear")
  sizes = {"vocab_size": VOCABULARY, "length": LENGTH, "batch": BATCH, "steps": STEPS}
  return behind_base_conv(
    cfg, model, options, **sizes, dtype=DTYPE, dim=width, num_heads=width // COLUMNS
  )


SWEEP = grid(
  make,
  {"model": ("gla", "sse", "mom"), "width": (64, 128), "rows": (32, 96, 160)},
  learning_rates=LEARNING_RATES,
  seeds=SEEDS,
  task=TASK,
  folder="{model}-d{width}-n{rows}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(
  x="rows", colors=COLORS, line="model", panel="width", chance=dict.fromkeys((64, 128), 1 / PAIRS)
)

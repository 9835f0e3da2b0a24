"""Recall of GLA, MetaLA and GSA, dense and with a quarter of their rows selected per token.

    python -m train sweep configs/sweeps/mqar_top_k.py

Multi-query associative recall of 16 pairs in 256 tokens, 2 heads, states of as many rows per head
as it has columns. Fillers are zeros (the SSE paper's setting 1) or random ids (setting 2).
Measured: nothing; `--dry-run` has the estimate.
"""

import dataclasses
from pathlib import Path

from train.config import Train, load_config
from train.sweeps import Plot, Recall, grid

LENGTH, PAIRS, BATCH, EPOCHS, ROWS = 256, 16, 256, 8, 50_000
HEADS = 2
LEARNING_RATES, SEEDS = (4.6e-4, 2.2e-3, 1e-2), (0, 1, 2)


def make(model: str, rows: str, width: int, fillers: str) -> tuple[Train, Recall]:
  """A model of SSE (Pan et al. 2025), section 3: row-sparse linear attention."""
  size = width // HEADS
  options = {"num_slots": size} if model == "gsa" else {"expand_k": 1.0}
  if rows == "top quarter":
    options["selected_rows"] = size // 4
  cfg = load_config(Path(__file__).parents[1] / "mqar.py:linear")
  changed = dataclasses.replace(
    cfg.model, mixer=model, mixer_options=options, dim=width, num_heads=HEADS
  )
  sizes = {"seq_len": LENGTH, "global_batch": BATCH, "steps": EPOCHS * (ROWS // BATCH)}
  task = Recall(pairs=PAIRS, train_rows=ROWS, random_fillers=fillers == "random")
  return dataclasses.replace(cfg, model=changed, **sizes), task


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
PLOT = Plot(x="rows", line="model", panel="width")

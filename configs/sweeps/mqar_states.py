"""Recall by the size of the state: SSE and MoM with more partitions, and GLA with as many rows.

    python -m train sweep configs/sweeps/mqar_states.py

Multi-query associative recall of 64 pairs in 256 tokens of a vocabulary of 512; a layer of
`base_conv`, without which none learns it in these steps, and one of the mixer, 64 wide with SwiGLU
and 2 heads, as in `benchmarks.sparse_training`. A head's state has `rows` rows of 32 numbers: those
of GLA's keys, or of all partitions of SSE and all memories of MoM, one of which is always on, 32
each.
Measured: nothing; `--dry-run` has the estimate.
"""

import dataclasses
from pathlib import Path
from typing import Any

from train.config import Train, load_config
from train.sweeps import Plot, Recall, grid

WIDTH, HEADS = 64, 2
LENGTH, BATCH, STEPS, ROWS, VOCABULARY = 256, 256, 6000, 100_000, 512
LEARNING_RATES, SEEDS = (1e-3, 2.2e-3, 4.6e-3), (0, 1, 2)


def make(model: str, rows: int) -> Train | None:
  """A model with a state of `rows` rows per head; a state of 32 rows has no partitions."""
  parts = rows // (WIDTH // HEADS)
  options: dict[str, Any] = {
    "gla": {"expand_k": float(parts)},
    "sse": {"num_partitions": parts - 1},
    "mom": {"num_memories": parts - 1, "num_selected": 1},
  }[model]
  if parts == 1 and model != "gla":
    return None
  cfg = load_config(Path(__file__).parents[1] / "mqar.py:linear")
  changed = dataclasses.replace(
    cfg.model,
    mixer=("base_conv", model),
    mixer_options={model: options},
    vocab_size=VOCABULARY,
    dim=WIDTH,
    num_heads=HEADS,
    channel_mixer="swiglu",
    channel_hidden=128,
    norm="rms",
    embedding_dropout=0.0,
  )
  optimizer = dataclasses.replace(cfg.optimizer, warmup_steps=STEPS // 20, b2=0.95, clip_norm=1.0)
  sizes = {"seq_len": LENGTH, "global_batch": BATCH, "steps": STEPS}
  return dataclasses.replace(cfg, model=changed, optimizer=optimizer, **sizes)


SWEEP = grid(
  make,
  {"model": ("gla", "sse", "mom"), "rows": (32, 96, 160, 288)},
  learning_rates=LEARNING_RATES,
  seeds=SEEDS,
  task=Recall(pairs=64, train_rows=ROWS),
  folder="{model}-n{rows}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="rows", line="model")

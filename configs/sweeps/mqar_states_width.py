"""Recall by width at equal states: SSE and MoM with two partitions and one always on, and GLA.

    python -m train sweep configs/sweeps/mqar_states_width.py

Models of `mqar_states.py`, wider, with heads of 32 columns and 96 rows: at a width of D, states of
96 D numbers in all three. 16 pairs in 128 tokens, of a vocabulary of 512: the 64 pairs of that file
are beyond most models in its 6,000 steps, and wider models cost more.
Measured: nothing; `--dry-run` has the estimate.
"""

import dataclasses
import runpy
from pathlib import Path

from train.config import Train
from train.sweeps import Plot, Recall, grid

STATES = runpy.run_path(str(Path(__file__).with_name("mqar_states.py")))
COLUMNS, ROWS = 32, 96
LENGTH, BATCH, STEPS = 128, 256, 3000


def make(model: str, width: int) -> Train:
  """A model of `mqar_states.py` with a state of 96 rows per head, `width` wide."""
  cfg: Train = STATES["make"](model, ROWS)
  sizes = {"dim": width, "num_heads": width // COLUMNS, "channel_hidden": 2 * width}
  optimizer = dataclasses.replace(cfg.optimizer, warmup_steps=STEPS // 20)
  model_of = dataclasses.replace(cfg.model, **sizes)
  steps = {"seq_len": LENGTH, "global_batch": BATCH, "steps": STEPS}
  return dataclasses.replace(cfg, model=model_of, optimizer=optimizer, **steps)


SWEEP = grid(
  make,
  {"model": ("gla", "sse", "mom"), "width": (64, 128, 256)},
  learning_rates=STATES["LEARNING_RATES"],
  seeds=STATES["SEEDS"],
  task=Recall(pairs=16, train_rows=STATES["ROWS"]),
  folder="{model}-d{width}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="width", line="model")

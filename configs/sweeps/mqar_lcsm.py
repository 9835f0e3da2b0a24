"""Recall of LCSM's codes: data-dependent or constant expansion, oscillation and shrinkage.

    python -m train sweep configs/sweeps/mqar_lcsm.py

Multi-query associative recall of 8 pairs in 128 tokens with states of 64 numbers per channel. The
paper has four tasks up to 16 pairs in 256 tokens, all codes, and seven learning rates.
Measured: nothing; `--dry-run` has the estimate.
"""

import dataclasses
from pathlib import Path

from train.config import Train, load_config
from train.sweeps import Plot, Recall, grid

LENGTH, BATCH, EPOCHS = 128, 256, 8
TASK = Recall(pairs=8, train_rows=50_000)
LEARNING_RATES, SEEDS = (5e-4, 1e-3, 5e-3), (0, 1, 2)
CODES = (
  *("0-0-0-0", "0-0-1-0", "0-1-1-0", "1-0-0-0", "1-0-1-0", "1-1-1-0"),
  *("1-2-1-0", "1-3-1-0", "1-6-1-0", "1-9-1-0", "1-10-1-0", "1-10-1-1"),
)


def make(code: str, width: int) -> Train:
  """A model of LCSM (Qin et al. 2024), section 4: recall by code."""
  cfg = load_config(Path(__file__).parents[1] / "mqar.py:linear")
  options = {"code": code, "state_dim": 64}
  changed = dataclasses.replace(cfg.model, mixer="lcsm", mixer_options=options, dim=width)
  sizes = {"seq_len": LENGTH, "global_batch": BATCH, "steps": EPOCHS * (TASK.train_rows // BATCH)}
  return dataclasses.replace(cfg, model=changed, **sizes)


SWEEP = grid(
  make,
  {"code": CODES, "width": (64, 128)},
  learning_rates=LEARNING_RATES,
  seeds=SEEDS,
  task=TASK,
  folder="{code}-d{width}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="width", line="code")

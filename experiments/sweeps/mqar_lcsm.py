"""Recall of LCSM's codes: data-dependent or constant expansion, oscillation and shrinkage.

    python -m train sweep experiments/sweeps/mqar_lcsm.py

Multi-query associative recall of 8 pairs in 64 tokens of a vocabulary of 256, with states of 64
numbers per channel, in 2,000 steps of 64 rows: 8.2M tokens per run. Codes that need the elementwise
scan are 64 wide only, since they take several times as long.

Differences from the paper: it has four tasks up to 16 pairs in 256 tokens of a vocabulary of 8,192,
all codes, and seven learning rates. Here, as in `mqar_dsf.py`, the first of two layers is a
`base_conv`, there is no MLP, kernels start at the scale of their inputs, with a norm after the
embedding and a head that is not tied to it, and there is a warmup, bfloat16 and no dropout.
Measured: all 171 runs (experiments/results/recall.md): codes whose expansion and shrinkage both
depend on the token have 0.94 to 1.00 with any decay, the others stay near a guess.
"""

from pathlib import Path

from experiments.recall_sweep import Recall
from experiments.small_runs import behind_base_conv
from lnssm_jax.mixers.lcsm_code import read_code
from train.config import Train, load_config
from train.sweeps import Plot, grid

LENGTH, BATCH, STEPS, VOCABULARY = 64, 64, 2000, 256
DTYPE = "bfloat16"  # of the products, for which the scans have kernels
TASK = Recall(pairs=8, train_rows=32_000, vocab_size=VOCABULARY)
LEARNING_RATES, SEEDS = (1e-3, 3e-3, 1e-2), (0, 1, 2)
WIDTHS = (64, 128)
CODES = (
  *("0-0-0-0", "0-0-1-0", "0-1-1-0", "1-0-0-0", "1-0-1-0", "1-1-1-0"),
  *("1-2-1-0", "1-3-1-0", "1-6-1-0", "1-9-1-0", "1-10-1-0", "1-10-1-1"),
)


def make(code: str, width: int) -> Train | None:
  """A model of LCSM (Qin et al. 2024), section 4: recall by code."""
  if width > WIDTHS[0] and read_code(code).op == "elementwise_decay_scan":
    return None
  cfg = load_config(Path(__file__).parents[1] / "configs" / "mqar.py:linear")
  options = {"code": code, "state_dim": 64}
  sizes = {"vocab_size": VOCABULARY, "length": LENGTH, "batch": BATCH, "steps": STEPS}
  return behind_base_conv(cfg, "lcsm", options, **sizes, dtype=DTYPE, dim=width)


SWEEP = grid(
  make,
  {"code": CODES, "width": WIDTHS},
  learning_rates=LEARNING_RATES,
  seeds=SEEDS,
  task=TASK,
  folder="{code}-d{width}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="code", panel="width", chance=dict.fromkeys(WIDTHS, 1 / 8))

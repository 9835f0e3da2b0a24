"""Recall of the mixers that Longhorn's paper compares, by width, without channel mixers.

    python -m train sweep experiments/sweeps/mqar_longhorn.py

Multi-query associative recall of 8 pairs in 64 tokens and of 16 in 128, of a vocabulary of 256, in
4,000 steps of 64 rows: 16.4M or 32.8M tokens per run. "rwkv" is RWKV-4, as in Zoology's code.

Differences from the paper: it has four tasks up to 64 pairs in 512 tokens of a vocabulary of 8,192,
Zoology's batches, and two layers of a mixer. Here, as in `mqar_dsf.py`, the first is a `base_conv`,
kernels start at the scale of their inputs, with a norm after the embedding and a head that is not
tied to it, and there is a warmup, bfloat16 and no dropout.
Measured: all 252 runs (experiments/results/recall.md): 128 wide Longhorn has 0.996 of 8 pairs and,
with two seeds of three, 0.98 and more of 16; Based 0.997 and more of both; Mamba, Hyena, RWKV-4 and
BaseConv stay near a guess.
"""

from pathlib import Path
from typing import Any

from experiments.recall_sweep import Recall
from experiments.small_runs import COLORS, behind_base_conv
from train.config import Train, load_config
from train.sweeps import Plot, grid

BATCH, STEPS, ROWS, VOCABULARY = 64, 4000, 64_000, 256
DTYPE = "bfloat16"  # of the products, for which the scans have kernels
PAIRS = {64: 8, 128: 16}  # {length: pairs}
LEARNING_RATES, SEEDS = (1e-3, 3e-3, 1e-2), (0, 1, 2)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
  "attention": ("softmax_attention", {}),
  "based": ("based", {}),
  "hyena": ("hyena", {}),
  "rwkv": ("rwkv4", {}),
  "base_conv": ("base_conv", {}),
  "mamba": ("mamba", {}),
  "longhorn": ("longhorn", {}),
}


def make(model: str, width: int, length: int) -> tuple[Train, Recall]:
  """A model of Longhorn (Liu et al. 2024), section 4.1: its token mixers alone."""
  mixer, options = MODELS[model]
  if mixer in ("hyena", "base_conv"):  # long convolutions; of "base_conv" in both layers
    options = {**options, "max_length": length}
  cfg = load_config(Path(__file__).parents[1] / "configs" / "mqar.py:linear")
  sizes = {"vocab_size": VOCABULARY, "length": length, "batch": BATCH, "steps": STEPS}
  task = Recall(pairs=PAIRS[length], train_rows=ROWS, vocab_size=VOCABULARY)
  return behind_base_conv(cfg, mixer, options, **sizes, dtype=DTYPE, dim=width), task


SWEEP = grid(
  make,
  {"model": MODELS, "width": (64, 128), "length": PAIRS},
  learning_rates=LEARNING_RATES,
  seeds=SEEDS,
  folder="{model}-d{width}-t{length}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(
  x="width",
  colors=COLORS,
  line="model",
  panel="length",
  chance={length: 1 / n for length, n in PAIRS.items()},
)

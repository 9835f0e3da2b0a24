"""Recall of the mixers that Longhorn's paper compares, by width, without channel mixers.

    python -m train sweep configs/sweeps/mqar_longhorn.py

Multi-query associative recall of 8 pairs in 64 tokens and of 16 in 128, of a vocabulary of 256, in
6,000 steps of 64 rows: 24.6M or 49.2M tokens per run. "rwkv" is RWKV-4, as in Zoology's code.

Differences from the paper: it has four tasks up to 64 pairs in 512 tokens of a vocabulary of 8,192,
Zoology's batches, and two layers of a mixer. Here, as in `mqar_dsf.py`, the first is a `base_conv`,
kernels start at the scale of their inputs, with a norm after the embedding and a head that is not
tied to it, and there is a warmup, bfloat16 and no dropout.
Measured: not this table. After 2,000 steps of 8 pairs in float32 Mamba had 0.13 to 0.15 at both
widths, a guess, Longhorn 0.14 at width 64 and up to 0.95 at 128; hence 6,000. `--dry-run` has the
estimate.
"""

from pathlib import Path
from typing import Any

from train.config import Train, load_config
from train.sweeps import Plot, Recall, behind_base_conv, grid

BATCH, STEPS, ROWS, VOCABULARY = 64, 6000, 64_000, 256
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
  conv = {"max_length": length}
  if mixer == "hyena":
    options = {**options, **conv}
  cfg = load_config(Path(__file__).parents[1] / "mqar.py:linear")
  sizes = {"vocab_size": VOCABULARY, "length": length, "batch": BATCH, "steps": STEPS}
  task = Recall(pairs=PAIRS[length], train_rows=ROWS, vocab_size=VOCABULARY)
  if mixer == "base_conv":  # both layers
    both: dict[str, Any] = {"mixer": mixer, "mixer_options": conv}
    return behind_base_conv(cfg, mixer, {}, **sizes, dtype=DTYPE, dim=width, **both), task
  return behind_base_conv(cfg, mixer, options, **sizes, dtype=DTYPE, conv=conv, dim=width), task


SWEEP = grid(
  make,
  {"model": MODELS, "width": (64, 128), "length": PAIRS},
  learning_rates=LEARNING_RATES,
  seeds=SEEDS,
  folder="{model}-d{width}-t{length}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="width", line="model", panel="length")

"""Recall of the mixers that Longhorn's paper compares, by width, without channel mixers.

    python -m train sweep configs/sweeps/mqar_longhorn.py

Multi-query associative recall of 8 pairs in 128 tokens, and of 16 in 256. The paper has four tasks
up to 64 pairs in 512 tokens, and Zoology's batches. "rwkv" is RWKV-4, as in Zoology's code.
Measured: nothing; `--dry-run` has the estimate.
"""

import dataclasses
from pathlib import Path
from typing import Any

from train.config import Train, load_config
from train.sweeps import Plot, Recall, grid

EPOCHS, ROWS = 8, 50_000
TASKS = {128: (8, 256), 256: (16, 256)}  # {length: (pairs, batch)}
LEARNING_RATES, SEEDS = (4.6e-4, 2.2e-3, 1e-2), (0, 1, 2)
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
  pairs, batch = TASKS[length]
  if mixer in ("hyena", "base_conv"):
    options = {**options, "max_length": length}
  cfg = load_config(Path(__file__).parents[1] / "mqar.py:linear")
  changed = dataclasses.replace(
    cfg.model, mixer=mixer, mixer_options=options, channel_mixer="none", dim=width
  )
  sizes = {"seq_len": length, "global_batch": batch, "steps": EPOCHS * (ROWS // batch)}
  return dataclasses.replace(cfg, model=changed, **sizes), Recall(pairs=pairs, train_rows=ROWS)


SWEEP = grid(
  make,
  {"model": MODELS, "width": (64, 128), "length": TASKS},
  learning_rates=LEARNING_RATES,
  seeds=SEEDS,
  folder="{model}-d{width}-t{length}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="width", line="model", panel="length")

"""Recall of the newest mixers next to GLA, gated DeltaNet and Mamba-2, at the published vocabulary.

    python -m train sweep experiments/sweeps/mqar_newest.py

Multi-query associative recall of a vocabulary of 8,192 in two layers of one mixer, without a
convolution before it and without channel mixers, 128 wide, of 16 pairs in 128 tokens and of 64 in
512; 4,000 steps of 64 rows. Softmax attention is the positive control: where it fails, the task
decides nothing. Seed 0 tries three rates and more at an edge, and its best is that of seeds 1 to 3,
the result. Rows that are not those of the result choose the rate and end a run.
Measured: nothing yet; it was not run.
"""

import dataclasses
from pathlib import Path
from typing import Any

from experiments.recall_sweep import Recall
from experiments.small_runs import COLORS, NEWEST
from train.config import Train, load_config
from train.sweeps import Plot, grid

WIDTH, BATCH, STEPS, ROWS, VOCABULARY = 128, 64, 4000, 64_000, 8192
PAIRS = {128: 16, 512: 64}  # {length: pairs}
MODELS = {**NEWEST, "log_linear": {"max_length": max(PAIRS)}}


def make(model: str, length: int) -> tuple[Train, Recall]:
  """Two layers of one mixer, by the settings of `configs/mqar.py:linear`."""
  cfg = load_config(Path(__file__).parents[1] / "configs" / "mqar.py:linear")
  sizes: dict[str, Any] = {
    "mixer": model,
    "mixer_options": MODELS[model],
    "dim": WIDTH,
    "num_layers": 2,
  }
  sizes |= {"vocab_size": VOCABULARY + 1, "channel_mixer": "none", "channel_mixer_options": {}}
  sizes |= {"dtype": "bfloat16", "learned_positions": None, "embedding_dropout": 0.0}
  cfg = dataclasses.replace(
    cfg,
    model=dataclasses.replace(cfg.model, **sizes),
    optimizer=dataclasses.replace(cfg.optimizer, warmup_steps=STEPS // 20),
    seq_len=length,
    global_batch=BATCH,
    steps=STEPS,
  )
  task = Recall(pairs=PAIRS[length], train_rows=ROWS, validation_rows=3_000, vocab_size=VOCABULARY)
  return cfg, task


SWEEP = grid(
  make,
  {"model": MODELS, "length": PAIRS},
  learning_rates=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
  seeds=(0, 1, 2, 3),
  folder="{model}-t{length}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(
  x="model", colors=COLORS, panel="length", chance={n: 1 / pairs for n, pairs in PAIRS.items()}
)
TUNING_SEED, FIRST_RATES = 0, (1e-3, 3e-3, 1e-2)
COPIES = 3

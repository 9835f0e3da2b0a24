"""Language models of the six mixers of Longhorn's table 2, at 24M to 25M parameters.

    LNSSM_DATA=FOLDER python -m train sweep experiments/sweeps/lm_longhorn.py

FOLDER as in `configs/lnssm_72m_books.py`; a BPE of 8,192 entries is trained on its text. 10.24M
tokens per run; seed 0 at three learning rates, three more seeds at the best of them: 368M tokens.
Models are those of `configs/longhorn.py`, 512 wide with 6 layers (12 without channel mixers);
documents are apart, each window once per epoch. On a GPU with less memory than an H200,
`--copies 1`.
Measured: 36 runs (experiments/results/language_models.md), loss on books: Mamba 4.27, Longhorn
4.32, RWKV-5 4.37, LLaMA 4.58, GLA 4.62, RetNet 4.66.
"""

import dataclasses
from pathlib import Path
from typing import Any

from experiments.small_runs import COLORS, shortened
from train.config import Train, load_config
from train.sweeps import Plot, grid

CONFIGS = Path(__file__).parents[2] / "configs"
DIM, LAYERS, HEADS, VOCABULARY = 512, 6, 8, 8192
LENGTH, BATCH, TOKENS = 1024, 32, 10_240_000
STEPS = TOKENS // (LENGTH * BATCH)
MODELS = ("retnet", "gla", "rwkv", "mamba", "llama", "longhorn")
HIDDEN = {"rwkv": 3 * DIM, "retnet": 920}


def make(model: str) -> Train:
  """A model of Longhorn (Liu et al. 2024), table 2, made smaller."""
  data = load_config(CONFIGS / "lnssm_72m_books.py").data
  cfg = load_config(CONFIGS / f"longhorn.py:{model}-120m-{LENGTH}")
  depth = 2 if cfg.model.channel_mixer == "none" else 1
  sizes: dict[str, Any] = {"dim": DIM, "num_layers": depth * LAYERS, "num_heads": HEADS}
  sizes["vocab_size"] = VOCABULARY
  if model in HIDDEN:
    sizes["channel_hidden"] = HIDDEN[model]
  cfg = dataclasses.replace(
    cfg,
    model=dataclasses.replace(cfg.model, **sizes),
    optimizer=dataclasses.replace(cfg.optimizer, warmup_steps=STEPS // 20),
    data=dataclasses.replace(data, folder="data/sweeps", tokenizer=f"bpe:{VOCABULARY}"),
  )
  return shortened(cfg, tokens=TOKENS, length=LENGTH, batch=BATCH)


SWEEP = grid(
  make,
  {"model": MODELS},
  learning_rates=(6e-4, 1.5e-3, 4e-3),
  seeds=(0, 1, 2, 3),
  folder="{model}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="learning_rate", colors=COLORS, line="model")
TUNING_SEED = 0

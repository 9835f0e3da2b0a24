"""The four models of LNSSM's figure 1 with each other's channel mixers, at 27M to 33M parameters.

    LNSSM_DATA=FOLDER python -m train sweep experiments/sweeps/lm_lnssm.py

FOLDER as in `configs/lnssm_72m_books.py`; a BPE of 8,192 entries is trained on its text. An epoch
of the paper per run, 10.24M tokens; seed 0 at three learning rates, two more seeds at the best of
them: 460M tokens. How much of a difference between models is that of their channel mixers: each
token mixer with LNSSM's MLP and with RWKV-4's channel mixer, and Mamba-2 also without, in twice the
layers. The paper's protocol (boundaries ignored, random crops, means over documents) and its
optimizer.
Measured: 7 min 44 s on one H200 with `--processes 5` (experiments/results/language_models.md).
"""

import dataclasses
from pathlib import Path
from typing import Any

from experiments.small_runs import COLORS, shortened
from train.config import Train, load_config
from train.sweeps import Plot, grid

CONFIGS = Path(__file__).parents[2] / "configs"
VOCABULARY, LENGTH, BATCH, TOKENS = 8192, 1024, 32, 10_240_000
CHANNEL_MIXERS: dict[str, dict[str, Any]] = {
  "gpt2": {"channel_mixer": "gpt2", "channel_hidden": None},
  "rwkv": {"channel_mixer": "rwkv4_channel_mix", "channel_hidden": None},
  "none": {"channel_mixer": "none", "num_layers": 12},
}


def make(model: str, channels: str) -> Train | None:
  """A token mixer of LNSSM's figure 1 with a channel mixer, in a smaller vocabulary."""
  if channels == "none" and model != "mamba2":
    return None
  data = load_config(CONFIGS / "lnssm_72m_books.py").data
  cfg = load_config(CONFIGS / f"lnssm_72m.py:{model}")
  protocol = {name: getattr(cfg.data, name) for name in ("boundaries", "order", "weighting")}
  text: dict[str, Any] = {"folder": "data/sweeps", "tokenizer": f"bpe:{VOCABULARY}", **protocol}
  shape: dict[str, Any] = {"vocab_size": VOCABULARY, **CHANNEL_MIXERS[channels]}
  cfg = dataclasses.replace(
    cfg,
    model=dataclasses.replace(cfg.model, **shape),
    data=dataclasses.replace(data, **text),
  )
  return shortened(cfg, tokens=TOKENS, length=LENGTH, batch=BATCH)


SWEEP = grid(
  make,
  {"model": ("lnssm", "rwkv4", "rwkv5", "mamba2"), "channels": CHANNEL_MIXERS},
  learning_rates=(8e-4, 2e-3, 5e-3),
  seeds=(0, 1, 2),
  folder="{model}-{channels}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="channels", colors=COLORS, line="model")
TUNING_SEED = 0

"""How much of the gap between linear and softmax attention normalization closes.

    LNSSM_DATA=FOLDER python -m train sweep experiments/sweeps/lm_normalization.py

FOLDER as in `configs/lnssm_72m_books.py`, with its tokenizer. Models have the shape of Pythia-70M,
as those of `configs/dsf_wikitext103.py`: softmax, linear and normalized attention, each without
positions and with a table of them, the same MLP, biases in all, and no dropout. 20.5M tokens per
run, less than an epoch, in windows of 1,024. The rate is chosen by seed 0 alone, of three rates and
more at an edge; the result is of seeds 1 to 6: 1106M
tokens. `experiments verdicts` has the share of the gap
that is closed, (linear - normalized) / (linear - softmax), with Fieller's interval.
Measured: all 58 runs in about 11 minutes of two H200s (experiments/results/normalization.md): on
books softmax 5.04 and 5.01, linear 5.05 and 5.06, normalized attention 5.29 and 5.31.
"""

import dataclasses
from pathlib import Path
from typing import Any

from experiments.small_runs import COLORS, shortened
from train.config import Train, load_config
from train.sweeps import Plot, grid

CONFIGS = Path(__file__).parents[2] / "configs"
LENGTH, BATCH, TOKENS = 1024, 32, 20_480_000
STEPS = TOKENS // (LENGTH * BATCH)
MODELS: dict[str, dict[str, Any]] = {
  "softmax": {"positions": "none", "use_bias": True, "max_length": LENGTH},
  "linear": {},
  "normalized": {},
}
POSITIONS = {"none": None, "learned": LENGTH}


def make(model: str, positions: str) -> Train:
  """A model of DSF (Sieber et al. 2024), table 1, on other text."""
  data = load_config(CONFIGS / "lnssm_72m_books.py").data
  cfg = load_config(CONFIGS / f"dsf_wikitext103.py:{model}")
  changes: dict[str, Any] = {"mixer_options": MODELS[model], "embedding_dropout": 0.0}
  changes |= {"learned_positions": POSITIONS[positions]}
  cfg = dataclasses.replace(
    cfg,
    model=dataclasses.replace(cfg.model, **changes),
    optimizer=dataclasses.replace(cfg.optimizer, warmup_steps=STEPS // 10),
    data=dataclasses.replace(data, folder="data/sweeps_20b"),
    sample=dataclasses.replace(cfg.sample, tokens=0),
  )
  return shortened(cfg, tokens=TOKENS, length=LENGTH, batch=BATCH)


SWEEP = grid(
  make,
  {"model": MODELS, "positions": POSITIONS},
  learning_rates=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
  seeds=range(7),
  folder="{model}-{positions}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="model", colors=COLORS, panel="positions")
TUNING_SEED, FIRST_RATES = 0, (3e-4, 1e-3, 3e-3)
COPIES = 3

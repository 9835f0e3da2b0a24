"""Language models of SSE's table 1, at 28M to 42M parameters: SSE, MoM, GLA, GDN, hybrids.

    LNSSM_DATA=FOLDER python -m train sweep experiments/sweeps/lm_sse.py

FOLDER as in `configs/lnssm_72m_books.py`; a BPE of 8,192 entries is trained on its text. Models are
those of `configs/sse.py`, 512 wide with 6 layers and 4 heads of 128; hybrids (-h) have softmax
attention in the last layer. 10.24M tokens per run; seed 0 at three learning rates, all but SSE also
at a lower one, three more seeds at the best of them: 613M tokens. Left out for time: the paper's
context of 8,192 tokens (here 1,024).
Measured: all 60 runs (experiments/results/language_models.md), loss on books: gated DeltaNet 4.24,
SSE 4.27, its hybrid 4.29, Transformer 4.37, hybrid of GLA 4.39, MoM 4.42, GLA 4.42.
"""

import dataclasses
from pathlib import Path
from typing import Any

from experiments.small_runs import COLORS, shortened
from train.config import Train, load_config
from train.sweeps import Plot, grid

CONFIGS = Path(__file__).parents[2] / "configs"
DIM, LAYERS, HEADS, HIDDEN, VOCABULARY = 512, 6, 4, 1408, 8192
LENGTH, BATCH, TOKENS = 1024, 32, 10_240_000
STEPS = TOKENS // (LENGTH * BATCH)
MODELS = (
  *("transformer", "gla", "gdn", "sse-n4k1", "sse-n4k2"),
  *("mom-n4k1", "mom-n4k2", "gla-h", "sse-h"),
)
RATES, LOWER_RATE, SEEDS = (6e-4, 1.5e-3, 4e-3), 2.4e-4, (0, 1, 2, 3)
FOLDER = "{model}-lr{lr:g}-seed{seed}"


def make(model: str) -> Train:
  """A model of SSE (Pan et al. 2025), table 1, made smaller."""
  data = load_config(CONFIGS / "lnssm_72m_books.py").data
  size = "800m" if model.startswith("mom") else "600m"
  cfg = load_config(CONFIGS / f"sse.py:{model}-{size}")
  sizes: dict[str, Any] = {
    "dim": DIM,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "channel_hidden": HIDDEN,
    "vocab_size": VOCABULARY,
    "remat": "none",
  }
  cfg = dataclasses.replace(
    cfg,
    model=dataclasses.replace(cfg.model, **sizes),
    optimizer=dataclasses.replace(cfg.optimizer, warmup_steps=STEPS // 20),
    data=dataclasses.replace(data, folder="data/sweeps", tokenizer=f"bpe:{VOCABULARY}"),
  )
  return shortened(cfg, tokens=TOKENS, length=LENGTH, batch=BATCH)


SWEEP = [
  *grid(make, {"model": MODELS}, learning_rates=RATES, seeds=SEEDS, folder=FOLDER),
  # 6e-4 is the best of RATES for all of these.
  *grid(
    make,
    {"model": [x for x in MODELS if not x.startswith("sse")]},
    learning_rates=(LOWER_RATE,),
    seeds=SEEDS,
    folder=FOLDER,
  ),
]
PLOT = Plot(x="learning_rate", colors=COLORS, line="model")
TUNING_SEED = 0

"""Language models of the newest mixers next to GLA, gated DeltaNet and Mamba-2, one body for all.

    LNSSM_DATA=FOLDER python -m train sweep experiments/sweeps/lm_newest.py

FOLDER as in `configs/lnssm_72m_books.py`. The body is that of Longhorn's GLA (`lm_longhorn.py`), in
which only the mixer differs, also its parameters. 5.12M tokens per run in steps of 16 rows; seed 0
at three learning rates, and more while the best is at an edge, seeds 1 to 3, the result, at the
best of them: 429M tokens. "gla_eps" is GLA with a larger eps in the norm of its outputs, which
bounds the gradient of the first tokens (docs/performance.md).
Measured: nine models (experiments/results/language_models.md), loss on books: RWKV-7 4.32, Mamba-2
4.41, Mamba-3 4.47, gated DeltaNet 4.75, GLA with the larger eps 4.79, attention 4.82, GLA 4.83, KDA
and gated DeltaNet-2 4.88.
"""

import dataclasses

from experiments.small_runs import COLORS, NEWEST, shortened
from experiments.sweeps import lm_longhorn
from train.config import Train
from train.sweeps import Plot, grid

LENGTH, BATCH, TOKENS = lm_longhorn.LENGTH, 16, 5_120_000
MODELS = {**NEWEST, "log_linear": {"max_length": LENGTH}, "gla_eps": {"norm_eps": 1e-2}}


def make(model: str) -> Train:
  """The GLA of `lm_longhorn.py` with another mixer."""
  cfg = lm_longhorn.make("gla")
  options = {"mixer": model.removesuffix("_eps"), "mixer_options": MODELS[model]}
  cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **options))
  return shortened(cfg, tokens=TOKENS, length=LENGTH, batch=BATCH)


SWEEP = grid(
  make,
  {"model": MODELS},
  learning_rates=(2.4e-4, 6e-4, 1.5e-3, 4e-3, 1e-2),
  seeds=(0, 1, 2, 3),
  folder="{model}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="learning_rate", colors=COLORS, line="model")
TUNING_SEED, FIRST_RATES = 0, (6e-4, 1.5e-3, 4e-3)
COPIES = 3

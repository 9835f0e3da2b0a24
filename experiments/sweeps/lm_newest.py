"""Language models of the newest mixers next to GLA, gated DeltaNet and Mamba-2, one body for all.

    LNSSM_DATA=FOLDER python -m train sweep experiments/sweeps/lm_newest.py

FOLDER as in `configs/lnssm_72m_books.py`. The body is that of Longhorn's GLA (`lm_longhorn.py`), in
which only the mixer differs, also its parameters. 10.24M tokens per run; seed 0 at three learning
rates, seeds 1 to 3 at the best of them: 797M tokens. The result is of seeds 1 to 3.
Measured: nothing yet; it was not run.
"""

import dataclasses

from experiments.small_runs import COLORS, NEWEST
from experiments.sweeps import lm_longhorn
from train.config import Train
from train.sweeps import Plot, grid

MODELS = {**NEWEST, "log_linear": {"max_length": lm_longhorn.LENGTH}}


def make(model: str) -> Train:
  """The GLA of `lm_longhorn.py` with another mixer."""
  cfg = lm_longhorn.make("gla")
  options = {"mixer": model, "mixer_options": MODELS[model]}
  return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **options))


SWEEP = grid(
  make,
  {"model": MODELS},
  learning_rates=(6e-4, 1.5e-3, 4e-3),
  seeds=(0, 1, 2, 3),
  folder="{model}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="learning_rate", colors=COLORS, line="model")
TUNING_SEED = 0

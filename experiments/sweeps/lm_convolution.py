"""Language models: six recurrences, each with and without a short convolution, in one block.

    LNSSM_DATA=FOLDER python -m train sweep experiments/sweeps/lm_convolution.py

FOLDER as in `configs/lnssm_72m_books.py`; a BPE of 8,192 entries is trained on its text. Whether a
short convolution, and not the recurrence, makes the differences between mixers. Each mixer stands
in the same block, 6 layers of 512 with SwiGLU of 1,408 and a norm after the embedding, without its
own token shift or convolution: with none at all, or all with the same one of its input, over four
tokens (`experiments/convolved.py`). 5.12M tokens per run. The rate is chosen by seed 0 alone, of
three rates and more at an edge; the result is of seeds 1 to 3: 368M tokens.
Measured: all 73 runs in about eight minutes of one H200 (experiments/results/convolution.md): the
convolution lowers the loss on books by 0.11 for Mamba-2, 0.08 for GLA and 0.02 for LNSSM.
"""

import dataclasses
from typing import Any

from experiments import convolved
from experiments.small_runs import COLORS, shortened
from experiments.sweeps import lm_sse
from train.config import Train
from train.sweeps import Plot, grid

convolved.register()
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
  "gla": ("gla", {}),
  "mamba2": ("mamba2", {"conv_size": None}),
  "sse": ("sse", {}),
  "longhorn": ("longhorn", {"conv_size": None}),
  "lnssm": ("lnssm", {"shift": "none"}),
  "rwkv5": ("unshifted_rwkv5", {"num_heads": 8}),
}
LENGTH, BATCH, TOKENS = 1024, 16, 5_120_000
CONVOLUTIONS = {"without": None, "with": 4}


def make(model: str, convolution: str) -> Train:
  """The GLA of `lm_sse.py` with another mixer, a norm after the embedding and a cosine."""
  cfg = lm_sse.make("gla")
  mixer, options = MODELS[model]
  given = {"inner": mixer, "options": options, "conv_size": CONVOLUTIONS[convolution]}
  changes: dict[str, Any] = {"mixer": convolved.Convolved.name, "mixer_options": given}
  cfg = dataclasses.replace(
    cfg,
    model=dataclasses.replace(cfg.model, **changes, embedding_norm=True),
    optimizer=dataclasses.replace(cfg.optimizer, schedule="cosine", final_lr=6e-5),
  )
  return shortened(cfg, tokens=TOKENS, length=LENGTH, batch=BATCH)


SWEEP = grid(
  make,
  {"model": MODELS, "convolution": CONVOLUTIONS},
  learning_rates=(2.4e-4, 6e-4, 1.5e-3, 4e-3, 1e-2),
  seeds=range(4),
  folder="{model}-{convolution}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="convolution", colors=COLORS, line="model")
TUNING_SEED, FIRST_RATES = 0, (6e-4, 1.5e-3, 4e-3)
COPIES = 3

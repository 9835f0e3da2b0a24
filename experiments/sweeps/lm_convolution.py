"""Language models: six recurrences, each with and without a short convolution, in one block.

    LNSSM_DATA=FOLDER python -m train sweep experiments/sweeps/lm_convolution.py

FOLDER as in `configs/lnssm_72m_books.py`; a BPE of 8,192 entries is trained on its text. Whether a
short convolution, and not the recurrence, makes the differences between mixers. Each mixer stands
in the same block, 6 layers of 512 with SwiGLU of 1,408 and a norm after the embedding, without its
own token shift or convolution: with none at all, or all with the same one of its input, over four
tokens (`experiments/convolved.py`). GLA is also there as in `lm_sse.py`, where few first
tokens have most of its gradient (docs/performance.md), and so with a larger eps. 5.12M tokens per
run. The rate is chosen by seed 0 alone, of three rates and more at an edge; the result is of
seeds 1 to 6: 644M tokens.
Measured: nothing yet.
"""

import dataclasses
from typing import Any

from experiments import convolved
from experiments.small_runs import COLORS, shortened
from experiments.sweeps import lm_sse
from train.config import Train
from train.sweeps import Plot, grid

convolved.register()
# As in `lm_sse.py`: no norm after the embedding, GPT-2's start; one with a larger eps of its norm.
STARTS = {"gla-gpt2": {}, "gla-gpt2-eps": {"norm_eps": 1e-2}}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
  "gla": ("gla", {}),
  "mamba2": ("mamba2", {"conv_size": None}),
  "sse": ("sse", {}),
  "longhorn": ("longhorn", {"conv_size": None}),
  "lnssm": ("lnssm", {"shift": "none"}),
  "rwkv5": ("unshifted_rwkv5", {"num_heads": 8}),
  **{name: ("gla", options) for name, options in STARTS.items()},
}
LENGTH, BATCH, TOKENS = 1024, 16, 5_120_000
CONVOLUTIONS = {"without": None, "with": 4}


def make(model: str, convolution: str) -> Train | None:
  """The GLA of `lm_sse.py` with another mixer, a norm after the embedding and a cosine."""
  if model in STARTS and convolution != "without":
    return None
  cfg = lm_sse.make("gla")
  mixer, options = MODELS[model]
  changes: dict[str, Any] = {"mixer": mixer, "mixer_options": options, "embedding_norm": False}
  if model not in STARTS:
    given = {"inner": mixer, "options": options, "conv_size": CONVOLUTIONS[convolution]}
    name = convolved.Convolved.name
    changes = {"mixer": name, "mixer_options": given, "embedding_norm": True}
  cfg = dataclasses.replace(
    cfg,
    model=dataclasses.replace(cfg.model, **changes),
    optimizer=dataclasses.replace(cfg.optimizer, schedule="cosine", final_lr=6e-5),
  )
  return shortened(cfg, tokens=TOKENS, length=LENGTH, batch=BATCH)


SWEEP = grid(
  make,
  {"model": MODELS, "convolution": CONVOLUTIONS},
  learning_rates=(2.4e-4, 6e-4, 1.5e-3, 4e-3, 1e-2),
  seeds=range(7),
  folder="{model}-{convolution}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="convolution", colors=COLORS, line="model")
TUNING_SEED, FIRST_RATES = 0, (6e-4, 1.5e-3, 4e-3)
COPIES = 3

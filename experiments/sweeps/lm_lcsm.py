"""Language models of LCSM's codes, at 21M and 22M parameters, in the order of the printed losses.

    LNSSM_DATA=FOLDER python -m train sweep experiments/sweeps/lm_lcsm.py

FOLDER as in `configs/lnssm_72m_books.py`; a BPE of 8,192 entries is trained on its text. All parts
depending on the token (1-1-1), all constant (0-0-0), one of them constant (table 1), decays of rows
or columns (2 to 5) and none (10), rotations (11) and the state-space form (0). Models are those of
`configs/lcsm_wikitext103.py` with their channel mixers; seed 0 at three learning rates, three more
seeds at the best of them. Left out for time: states of 128 rows (here 32), activations, tau and the
other codes, among them those of table 1 with two constants, which run at a fraction of the speed,
and all but 5M tokens per run, 360M in all.
Measured: all 72 runs (experiments/results/language_models.md), loss on books: rotations 5.86, no
decay 5.32, constant decays 5.08 to 5.12, decays of the token 4.87 to 5.07, and with a constant
expansion or shrinkage 4.50 and 4.53.
"""

import dataclasses
import runpy
from pathlib import Path

from experiments.small_runs import shortened
from train.config import Train, apply_overrides, load_config
from train.sweeps import Plot, grid

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER = CONFIGS / "lcsm_wikitext103.py"
VOCABULARY, STATE = 8192, 32
LENGTH, BATCH, TOKENS = 512, 16, 5_000_000
STEPS = TOKENS // (LENGTH * BATCH)
CODES = (  # from the largest printed perplexity to the smallest
  *("1-10-1-0", "0-0-0-0", "1-2-1-0", "1-5-1-0", "1-11-1-0", "1-3-1-0"),
  *("1-4-1-0", "0", "1-0-1-0", "0-1-1-0", "1-1-1-0", "1-1-0-0"),
)
ROWS = {row.options["code"]: row for row in reversed(runpy.run_path(str(PAPER))["SWEEP"])}


def make(code: str) -> Train:
  """A model of LCSM (Qin et al. 2024), tables 1 and 4, with a smaller state and vocabulary."""
  data = load_config(CONFIGS / "lnssm_72m_books.py").data
  sizes = [f"model.mixer_options.state_dim={STATE}", f"model.vocab_size={VOCABULARY}"]
  text = dataclasses.replace(data, folder="data/sweeps", tokenizer=f"bpe:{VOCABULARY}")
  cfg = apply_overrides(
    dataclasses.replace(load_config(PAPER), data=text), [*ROWS[code].settings, *sizes]
  )
  cfg = dataclasses.replace(
    cfg,
    optimizer=dataclasses.replace(cfg.optimizer, warmup_steps=STEPS // 12),
  )
  return shortened(cfg, tokens=TOKENS, length=LENGTH, batch=BATCH)


SWEEP = grid(
  make,
  {"code": CODES},
  learning_rates=(5e-4, 1.5e-3, 4.5e-3),
  seeds=(0, 1, 2, 3),
  folder="{code}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="code")
TUNING_SEED = 0

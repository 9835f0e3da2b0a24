"""Recall of LCSM's parts one by one: oscillations, activations, exponents, single factors.

    python -m train sweep experiments/sweeps/mqar_lcsm_parts.py

Multi-query associative recall of 16 pairs in 128 tokens of a vocabulary of 256, 64 wide with states
of 64 numbers per channel, at most 4,000 steps of 64 rows. The codes of figures 3, 5, 6 and 7 that
have a kernel or are no elementwise scan, and those with a single factor of the token: eight
oscillations, seven activations of 1-1-1 and three of 1-10-1, seven exponents 1/tau of the decay,
the state-space form. Seed 0 tries three rates, and more while the best is at an edge, on rows that
are not those of the result, which is of seeds 1 to 3.

Differences from the paper: as in `mqar_lcsm.py`.
Measured: seven of the codes (experiments/results/recall.md): 0.96 to 0.99, but for 1-1-1-0, of
which one seed has not begun to learn, and the state-space form, of which none has.
"""

from pathlib import Path

from experiments.recall_sweep import Recall
from experiments.small_runs import behind_base_conv
from train.config import Train, load_config
from train.sweeps import Plot, grid

LENGTH, BATCH, STEPS, VOCABULARY, WIDTH = 128, 64, 4000, 256, 64
TASK = Recall(pairs=16, train_rows=64_000, validation_rows=3_000, vocab_size=VOCABULARY)
TAU = 16  # of LCSM
CODES = (
  "0",
  *(f"1-{o}-1-0" for o in (0, 1, 2, 3, 4, 5, 10, 11)),
  *(f"1-1-1-{a}" for a in range(1, 8)),
  *(f"1-10-1-{a}" for a in (1, 4, 6)),
  *("0-0-0-0", "1-0-0-0", "0-0-1-0", "0-1-0-0"),
)
TAUS = (1, 2, 4, 8, 16, 32, 64)  # of 1-1-1-0; the others have 16


def make(code: str, tau: int) -> Train | None:
  """A model of LCSM (Qin et al. 2024), section 4: recall by code."""
  if tau != TAU and code != "1-1-1-0":
    return None
  cfg = load_config(Path(__file__).parents[1] / "configs" / "mqar.py:linear")
  options = {"code": code, "state_dim": WIDTH}
  options |= {} if tau == TAU else {"gate_logit_normalizer": tau}
  sizes = {"vocab_size": VOCABULARY, "length": LENGTH, "batch": BATCH, "steps": STEPS}
  return behind_base_conv(cfg, "lcsm", options, **sizes, dtype="bfloat16", dim=WIDTH)


SWEEP = grid(
  make,
  {"code": CODES, "tau": TAUS},
  learning_rates=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
  seeds=range(4),
  task=TASK,
  folder="{code}-tau{tau}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="code", panel="tau", chance={TAU: 1 / 16}, where={"tau": TAU})
TUNING_SEED, FIRST_RATES = 0, (1e-3, 3e-3, 1e-2)
COPIES = 3

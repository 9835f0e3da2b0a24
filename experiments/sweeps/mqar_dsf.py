"""Recall of DSF's systems by width and state size, and of qLSTM's two; with and without an MLP.

    python -m train sweep experiments/sweeps/mqar_dsf.py

Multi-query associative recall of 8 pairs in 64 tokens of a vocabulary of 256, in 2,000 steps of 64
rows, 8.2M tokens per run. The state size is that of a channel: rows per head in attention, N in S6
and SSD; of qLSTM it is 1. `mlp` is the control: at one width and state, all models with an MLP.

Differences from the paper: it has four tasks (64 to 512 tokens with 4 to 64 pairs) with a
vocabulary of 8,192, widths up to 512, states of 32 to 256, up to 64 epochs of 100,000 rows, and two
layers of its system. Here the first of two layers is a `base_conv`; kernels start with a standard
deviation that depends on their inputs instead of 0.02, with a norm after the embedding and a head
that is not tied to it; there is a warmup, no dropout, and no MLP but in the control. Softmax
attention has a table of positions and rotary ones and no biases, the others no positions; the
paper's have a table, softmax attention has biases, S6 and SSD have neither. With the paper's layers
and start, a vocabulary of 8,192, 8 pairs in 128 tokens and 51M tokens per run, linear and
normalized attention and S6 stayed at 1/8, a guess among the values of the row (on an H200).
Measured: all 279 runs in 7 min 24 s of an H200 shared with four other processes
(experiments/results/recall.md): linear attention rises from 0.64 to 0.95 with width and state; S6,
SSD, normalized and softmax attention are above 0.97 with a state of 16; qLSTM stays at a guess.
"""

from pathlib import Path

from experiments.recall_sweep import Recall
from experiments.small_runs import COLORS, behind_base_conv
from train.config import Train, load_config
from train.sweeps import Plot, grid

LENGTH, BATCH, STEPS, VOCABULARY = 64, 64, 2000, 256
TASK = Recall(pairs=8, train_rows=32_000, vocab_size=VOCABULARY)
LEARNING_RATES, SEEDS = (1e-3, 3e-3, 1e-2), (0, 1, 2)
WIDTHS, STATES = (64, 128), (16, 64)
SYSTEMS = {  # option of the state size
  "linear": "head_dim",
  "softmax": "head_dim",
  "normalized": "head_dim",
  "s6": "state_dim",
  "ssd": "state_dim",
}
GATED = {"qlstm": "qlstm", "qlstm reversed": "qlstm_reversed"}
CONTROL = (128, 64)  # width and state of the models with an MLP


def make(model: str, width: int, state: int, mlp: str) -> Train | None:
  """A model of DSF (Sieber et al. 2024), figures 2 to 4."""
  gated = model in GATED
  if (state == 1) != gated or (
    mlp == "yes" and (width, state) != (CONTROL[0], 1 if gated else CONTROL[1])
  ):
    return None
  cfg = load_config(
    Path(__file__).parents[1] / "configs" / f"mqar.py:{'linear' if gated else model}"
  )
  mixer = GATED.get(model, str(cfg.model.mixer))
  options = {} if gated else {SYSTEMS[model]: state}
  sizes = {"vocab_size": VOCABULARY, "length": LENGTH, "batch": BATCH, "steps": STEPS}
  others = {"channel_mixer": "gpt2" if mlp == "yes" else "none"}
  others |= {"learned_positions": 512} if model == "softmax" else {}
  return behind_base_conv(cfg, mixer, options, **sizes, **others, dim=width)


SWEEP = grid(
  make,
  {"model": (*SYSTEMS, *GATED), "width": WIDTHS, "state": (1, *STATES), "mlp": ("no", "yes")},
  learning_rates=LEARNING_RATES,
  seeds=SEEDS,
  task=TASK,
  folder="{model}-d{width}-n{state}-mlp-{mlp}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(
  x="width",
  colors=COLORS,
  line="model",
  panel="state",
  where={"mlp": "no"},
  chance=dict.fromkeys((1, *STATES), 1 / 8),
)

"""Recall of DSF's systems by width and state size, and of qLSTM's two; with and without an MLP.

    python -m train sweep configs/sweeps/mqar_dsf.py

Multi-query associative recall of 8 pairs in 128 tokens. The state size is that of a channel: rows
per head in attention, N in S6 and SSD; of qLSTM it is 1. `mlp` is the control: all models with the
MLP, and at one width and state without. The paper has four tasks (64 to 512 tokens with 4 to 64
pairs), widths up to 512 and up to 64 epochs of 100,000 rows: more than a table here may cost.
Measured: nothing; `--dry-run` has the estimate.
"""

import dataclasses
from pathlib import Path

from train.config import Train, load_config
from train.sweeps import Plot, Recall, grid

LENGTH, BATCH, EPOCHS = 128, 256, 8
TASK = Recall(pairs=8, train_rows=50_000)
LEARNING_RATES, SEEDS = (4.6e-4, 2.2e-3, 1e-2), (0, 1, 2)
WIDTHS, STATES = (64, 128), (32, 128)
SYSTEMS = {  # option of the state size
  "linear": "head_dim",
  "softmax": "head_dim",
  "normalized": "head_dim",
  "s6": "state_dim",
  "ssd": "state_dim",
}
GATED = {"qlstm": "qlstm", "qlstm reversed": "qlstm_reversed"}
CONTROL = (128, 128)  # width and state of the models without an MLP


def make(model: str, width: int, state: int, mlp: str) -> Train | None:
  """A model of DSF (Sieber et al. 2024), figures 2 to 4."""
  gated = model in GATED
  if (state == 1) != gated or (
    mlp == "no" and (width, state) != (CONTROL[0], 1 if gated else CONTROL[1])
  ):
    return None
  cfg = load_config(Path(__file__).parents[1] / f"mqar.py:{'linear' if gated else model}")
  options = {} if gated else {**cfg.model.mixer_options, SYSTEMS[model]: state}
  mixer = GATED.get(model, cfg.model.mixer)
  steps = EPOCHS * (TASK.train_rows // BATCH)
  changed = dataclasses.replace(
    cfg.model,
    mixer=mixer,
    mixer_options=options,
    dim=width,
    channel_mixer="gpt2" if mlp == "yes" else "none",
  )
  sizes = {"seq_len": LENGTH, "global_batch": BATCH, "steps": steps}
  return dataclasses.replace(cfg, model=changed, **sizes)


SWEEP = grid(
  make,
  {"model": (*SYSTEMS, *GATED), "width": WIDTHS, "state": (1, *STATES), "mlp": ("yes", "no")},
  learning_rates=LEARNING_RATES,
  seeds=SEEDS,
  task=TASK,
  folder="{model}-d{width}-n{state}-mlp-{mlp}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="width", line="model", panel="state", where={"mlp": "yes"})

"""Recall of SSE by its number of partitions and by how many of them a token uses.

    python -m train sweep experiments/sweeps/mqar_partitions.py

Figure 7 of SSE's paper in small: multi-query associative recall of 32 pairs in 192 tokens of a
vocabulary of 256, in at most 6,000 steps of 64 rows. The model is that of `mqar_states.py`, 64
wide: a `base_conv`, then SSE with two heads, whose partitions have 32 rows and 32 columns; one more
is always on. Seed 0 tries three rates, and more while the best is at an edge; the result is of
seeds 1 to 3 at its best.
Measured: 8 partitions of which a token uses one (experiments/results/recall.md): 3 of 3 runs solve
the task; with 2 and 4 the seed that chooses the rate alone.
"""

from pathlib import Path

from experiments.recall_sweep import Recall
from experiments.small_runs import behind_base_conv
from experiments.sweeps import mqar_states
from train.config import Train, load_config
from train.sweeps import Plot, grid

LENGTH, PAIRS, BATCH, STEPS, VOCABULARY, WIDTH = 192, 32, 64, 6000, 256, 64


def make(partitions: int, selected: int) -> Train:
  """SSE with so many partitions, of which a token uses `selected`."""
  return behind_base_conv(
    load_config(Path(__file__).parents[1] / "configs" / "mqar.py:linear"),
    "sse",
    {"num_partitions": partitions, "num_selected": selected},
    vocab_size=VOCABULARY,
    length=LENGTH,
    batch=BATCH,
    steps=STEPS,
    dtype=mqar_states.DTYPE,
    dim=WIDTH,
    num_heads=WIDTH // mqar_states.COLUMNS,
  )


SWEEP = grid(
  make,
  {"partitions": (2, 4, 8), "selected": (1, 2)},
  learning_rates=(3e-4, *mqar_states.LEARNING_RATES, 3e-2),
  seeds=range(4),
  task=Recall(pairs=PAIRS, train_rows=64_000, validation_rows=3_000, vocab_size=VOCABULARY),
  folder="n{partitions}-k{selected}-lr{lr:g}-seed{seed}",
)
PLOT = Plot(x="partitions", line="selected", chance={None: 1 / PAIRS})
TUNING_SEED, FIRST_RATES = 0, mqar_states.LEARNING_RATES
COPIES = 3

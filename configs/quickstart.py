"""A small LNSSM on the sources of Python's standard library: minutes on a 2-core CPU.

    make train
    python -m train fit --config configs/quickstart.py

Costs about two minutes on two idle CPU cores, compilation included. Measured: 2.765 bits per byte
of validation text, from 8.17 at the start (docs/results/training.md).
"""

from train.config import Data, Model, Optimizer, Sample, Train


def get_config() -> Train:
  """The run of `make train`."""
  return Train(
    model=Model(dim=128, num_layers=4, num_heads=4, vocab_size=257, dtype="float32"),
    optimizer=Optimizer(peak_lr=3e-3, final_lr=3e-4, logit_penalty=1e-4),
    data=Data(
      folder="data/python-stdlib",
      tokenizer="bytes",
      train=("train",),
      validation=("validation",),
      sources={"train": "python-stdlib", "validation": "python-stdlib"},
    ),
    run_dir="runs/quickstart",
    seq_len=256,
    global_batch=8,  # sequences: 2,048 tokens per step
    steps=240,
    log_every=10,
    eval_every=120,
    checkpoint_every=120,
    sample=Sample(prompt="def ", tokens=200),
  )

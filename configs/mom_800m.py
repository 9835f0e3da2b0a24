"""The mixture of memories that the SSE paper compares with, of 800M parameters.

    python -m train fit --config configs/mom_800m.py --set data.sources.train=TEXT \\
      --set data.sources.validation=TEXT --set data.tokenizer=TOKENIZER_JSON

TEXT and TOKENIZER_JSON as in `sse_600m.py`, whose other settings these are. Four memories and
a shared one, each with its keys, values and decays; a token uses one memory (n4k1), or two: `--set
model.mixer_options.num_selected=2`. Measured: 846,180,352 parameters. The run has not been made.
"""

import dataclasses
from pathlib import Path

from train.config import Train, load_config


def get_config() -> Train:
  """MoM as a baseline of SSE (Pan et al. 2025), table 1."""
  cfg = load_config(Path(__file__).with_name("sse_600m.py"))
  model = dataclasses.replace(cfg.model, mixer="mom", mixer_options={"num_selected": 1})
  data = dataclasses.replace(cfg.data, folder="data/mom_800m")
  return dataclasses.replace(cfg, model=model, data=data, run_dir="runs/mom_800m")

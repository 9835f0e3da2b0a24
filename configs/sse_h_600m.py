"""The SSE paper's hybrid SSE-H at 600M parameters: softmax attention after every five layers.

    python -m train fit --config configs/sse_h_600m.py --set data.sources.train=TEXT \\
      --set data.sources.validation=TEXT --set data.tokenizer=TOKENIZER_JSON

TEXT and TOKENIZER_JSON as in `sse_600m.py`, whose other settings these are. The pattern
of its converted 12B model: `--set
model.mixer=sse,sliding_window_attention,sse,sliding_window_attention,softmax_attention`. Rotary
positions of the softmax layers are ours; the paper's are not known. Measured: 627,453,440
parameters. The run has not been made.
"""

import dataclasses
from pathlib import Path

from train.config import Train, load_config


def get_config() -> Train:
  """SSE-H (Pan et al. 2025), section 4: five layers of SSE, then one of softmax attention."""
  cfg = load_config(Path(__file__).with_name("sse_600m.py"))
  mixer = ("sse",) * 5 + ("softmax_attention",)
  options = {"softmax_attention": {"max_length": cfg.seq_len}}
  model = dataclasses.replace(cfg.model, mixer=mixer, mixer_options=options)
  data = dataclasses.replace(cfg.data, folder="data/sse_h_600m")
  return dataclasses.replace(cfg, model=model, data=data, run_dir="runs/sse_h_600m")

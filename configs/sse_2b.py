"""The SSE paper's language model of 2B parameters; by --set its GLA and Transformer.

    python -m train fit --config configs/sse_2b.py --set data.sources.train=TEXT \\
      --set data.sources.validation=TEXT --set data.tokenizer=TOKENIZER_JSON

TEXT and TOKENIZER_JSON as in `sse_600m.py`, whose other settings these are. 18 layers of 2,304 with
18 heads, 1.3B parameters without embeddings, 100B tokens; the width of the channel mixer is
inferred. The baselines: `--set model.mixer=gla`, and as in `sse_600m.py` the Transformer.
Measured: 2,021,294,592 parameters. The run has not been made.
"""

import dataclasses
from pathlib import Path

from train.config import Train, load_config


def get_config() -> Train:
  """The 2B run of SSE (Pan et al. 2025), table 1."""
  cfg = load_config(Path(__file__).with_name("sse_600m.py"))
  sizes = {"dim": 2304, "num_layers": 18, "num_heads": 18, "channel_hidden": 7424}
  model, steps = (
    dataclasses.replace(cfg.model, **sizes),
    100_000_000_000 // (8192 * cfg.global_batch),
  )
  optimizer = dataclasses.replace(cfg.optimizer, warmup_steps=steps // 20)
  data = dataclasses.replace(cfg.data, folder="data/sse_2b")
  rest = {"optimizer": optimizer, "data": data, "run_dir": "runs/sse_2b", "steps": steps}
  return dataclasses.replace(cfg, model=model, **rest)

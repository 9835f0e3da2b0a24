"""Settings of the small runs that the sweeps of the papers compare."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from train import config

COLORS = {  # of a mixer in all pictures, by the names that it has in them
  **dict.fromkeys(("attention", "softmax", "softmax_attention", "transformer", "llama"), "black"),
  **dict.fromkeys(("rwkv", "rwkv4"), "tab:olive"),
  **dict.fromkeys(("sse", "sse-n4k1", "sse-n4k2", "sse-h"), "tab:purple"),
  **dict.fromkeys(("mom", "mom-n4k1", "mom-n4k2"), "tab:brown"),
  **dict.fromkeys(("gla", "gla-h"), "tab:orange"),
  "gla_eps": "turquoise",
  **dict.fromkeys(("lnssm", "qlstm", "qlstm reversed"), "tab:red"),
  **dict.fromkeys(("mamba2", "ssd"), "tab:blue"),
  **dict.fromkeys(("mamba", "s6"), "tab:cyan"),
  "longhorn": "tab:pink",
  "base_conv": "tab:gray",
  "hyena": "rosybrown",
  "based": "gold",
  "linear": "lightgreen",
  "normalized": "darkgreen",
  "retnet": "navy",
  **dict.fromkeys(("gdn", "gated_delta_net"), "limegreen"),
  "gated_delta_net2": "seagreen",
  "delta_net": "mediumaquamarine",
  "delta_product": "slategray",
  "comba": "peru",
  "kda": "crimson",
  "rwkv7": "darkolivegreen",
  "mamba3": "deepskyblue",
  "mlstm": "magenta",
  "log_linear": "indigo",
  "short_conv": "darkgoldenrod",
  "rwkv5": "yellowgreen",
  "gsa": "teal",
  "metala": "darkviolet",
}

# Options of the newest mixers and of those that they are compared with, by name.
NEWEST: dict[str, dict[str, Any]] = {
  "softmax_attention": {},
  "gla": {},
  "gated_delta_net": {},
  "mamba2": {},
  "kda": {},
  "gated_delta_net2": {},
  "comba": {},
  "delta_product": {},
  "rwkv7": {},
  "mamba3": {},
  "mlstm": {},
  "log_linear": {},
  "short_conv": {},
}


def shortened(cfg: config.Train, *, tokens: int, length: int, batch: int) -> config.Train:
  """The run of a language model with at most `tokens`, scored and saved at its end alone.

  Args:
    length, batch: `seq_len` and `global_batch` of a step, whose gradient is not accumulated.
  """
  steps = tokens // (length * batch)
  return dataclasses.replace(
    cfg,
    seq_len=length,
    global_batch=batch,
    accumulate=1,
    steps=steps,
    log_every=20,
    eval_every=steps,
    checkpoint_every=steps,
  )


def behind_base_conv(
  cfg: config.Train,
  mixer: str,
  options: Mapping[str, Any],
  /,
  *,
  vocab_size: int,
  length: int,
  batch: int,
  steps: int,
  **model: Any,
) -> config.Train:
  """A small run of recall whose first layer is a `base_conv`, and the second the mixer.

  With that layer, a norm after the embedding, a head that is not tied to it, kernels at the scale
  of their inputs, a warmup and no dropout, linear systems learn recall in a few million tokens.

  Args:
    vocab_size: of the task.
    length, batch: `seq_len` and `global_batch` of a step.
    model: other settings of the model, which have precedence.
  """
  settings: dict[str, Any] = {
    "mixer": ("base_conv", mixer),
    "mixer_options": {mixer: dict(options)},
    "vocab_size": vocab_size + 1,  # an id to spare, as in the runs of experiments/results/recall.md
    "channel_mixer": "none",
    "channel_mixer_options": {},
    "learned_positions": None,
    "embedding_norm": True,
    "embedding_dropout": 0.0,
    "initialization": "lnssm",
    "tie_embeddings": False,
  }
  return dataclasses.replace(
    cfg,
    model=dataclasses.replace(cfg.model, **(settings | model)),
    optimizer=dataclasses.replace(cfg.optimizer, warmup_steps=steps // 20),
    seq_len=length,
    global_batch=batch,
    steps=steps,
  )

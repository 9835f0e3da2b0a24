"""The language models that the Longhorn paper compares: its tables 2 and 3.

    python -m train fit --config configs/longhorn.py:longhorn-120m-1024 \\
      --set data.sources.train=TEXT --set data.sources.validation=TEXT \\
      --set data.tokenizer=TOKENIZER_JSON

TEXT is a .txt, .jsonl or .jsonl.xz file or a folder of such. Table 2, OpenWebText: variants
MODEL-120m-LENGTH and MODEL-350m-LENGTH, MODEL one of retnet, gla, rwkv, mamba, llama and longhorn,
LENGTH 1024 or 4096; TOKENIZER_JSON is GPT-2's (50,257 entries; the models have 50,304), and a step
has 0.49M tokens.
Table 3, 100B tokens of SlimPajama: longhorn-1b3, llama-1b3, gla-1b3, mamba-1b3; TOKENIZER_JSON has
32,000 entries. Models are those of the authors' code, down to widths, biases and eps.
Measured: 128,563,968 parameters (docs/configs.md has all); none has been trained.
"""

import dataclasses
from typing import Any, NamedTuple

from train.config import Data, Model, Optimizer, Train


class Size(NamedTuple):
  """The shape of a Transformer, and how long it is trained."""

  dim: int
  num_layers: int
  num_heads: int
  peak_lr: float
  steps: int


SIZES = {
  "120m": Size(768, 12, 12, 6e-4, 4800),
  "350m": Size(1024, 24, 16, 3e-4, 13_500),
  "1b3": Size(2048, 24, 16, 3e-4, 47_684),
}
# 1.8 D in whole heads: D = 768 and 12 heads have 1380, D = 1024 and 16 heads 1840.
RETNET_WIDTH = 1.796875


def _models(dim: int, length: int) -> dict[str, dict[str, Any]]:
  """Settings of each model, other than its sizes."""
  return {
    "longhorn": {"mixer": "longhorn", "channel_mixer": "none"},
    "mamba": {"mixer": "mamba", "channel_mixer": "none"},
    "llama": {
      "mixer": "softmax_attention",
      "mixer_options": {"max_length": length},
      "channel_mixer": "swiglu",
    },
    "gla": {
      "mixer": "gla",
      "mixer_options": {"norm": "layer", "norm_scale": False, "gate_bias": True},
      "channel_mixer": "swiglu",
    },
    "retnet": {
      "mixer": "retnet",
      "mixer_options": {
        "expand_v": RETNET_WIDTH,
        "frequencies": "torchscale",
        "norm_scale": False,
        "norm_eps": 1e-6,
      },
      "channel_mixer": "geglu",
      "channel_hidden": int(RETNET_WIDTH * dim),
      "norm_eps": 1e-6,
    },
    "rwkv": {
      "mixer": "rwkv5",
      "mixer_options": {"decay": "head"},
      "channel_mixer": "rwkv4_channel_mix",
      "channel_hidden": 3 * dim,
      "norm": "layer_without_bias",
      "learned_positions": length,
    },
  }


_NAMES = tuple(_models(1, 1))
# {name: (model, size, length)}
VARIANTS = {
  f"{model}-{size}-{length}": (model, size, length)
  for size in ("120m", "350m")
  for length in (1024, 4096)
  for model in _NAMES
} | {f"{model}-1b3": (model, "1b3", 2048) for model in _NAMES[:4]}


def get_config(variant: str) -> Train:
  """A run of Longhorn (Liu et al. 2024), table 2 or 3; Mamba's kind has twice the layers."""
  model, size, length = VARIANTS[variant]
  dim, num_layers, num_heads, peak_lr, steps = SIZES[size]
  settings: dict[str, Any] = {"norm": "rms", "embedding_norm": False, "tie_embeddings": True}
  settings |= _models(dim, length)[model]
  depth = 2 if settings["channel_mixer"] == "none" else 1
  config = Train(
    model=Model(
      dim=dim,
      num_layers=depth * num_layers,
      num_heads=num_heads,
      vocab_size=50_304,
      remat="dots",
      **settings,
    ),
    optimizer=Optimizer(
      peak_lr=peak_lr,
      final_lr=6e-5,
      schedule="cosine",
      warmup_steps=steps // 20,
      b1=0.9,
      b2=0.95,
      weight_decay=0.1,
      clip_norm=1.0,
    ),
    data=Data(
      folder="data/longhorn",
      tokenizer="data/gpt2_tokenizer.json",
      train=("train",),
      validation=("validation",),
      boundaries="ignore",
      order="random_crops",
      weighting="crops",
    ),
    run_dir=f"runs/longhorn-{variant}",
    seq_len=length,
    global_batch=480 * 1024 // length,
    accumulate=8,
    steps=steps,
    eval_every=200,
    eval_tokens=200 * 12 * 1024,  # 200 batches; their size is not known, 12 x 1,024 is nanoGPT's
    checkpoint_every=200,
  )
  return _of_table_3(config) if size == "1b3" else config


def _of_table_3(config: Train) -> Train:
  """Steps of 2M tokens, 1B of them of warmup as in GLA's paper, which the recipe follows."""
  change = dataclasses.replace
  heads = 4 if config.model.mixer == "gla" else config.model.num_heads
  data: Any = {"boundaries": "reset", "order": "windows", "weighting": "tokens"}  # not known
  optimizer = {"final_lr": 3e-5, "weight_decay": 0.01, "warmup_steps": 10**9 // 2**21}
  return change(
    config,
    model=change(config.model, vocab_size=32_000, num_heads=heads),
    optimizer=change(config.optimizer, **optimizer),
    data=change(config.data, folder="data/longhorn-1b3", tokenizer="data/tokenizer.json", **data),
    global_batch=1024,
    accumulate=16,
    eval_every=1000,
    eval_tokens=None,
    checkpoint_every=1000,
  )

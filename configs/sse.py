"""The language models that the SSE paper compares: its table 1, at 600M and 2B parameters.

    python -m train fit --config configs/sse.py:sse-n4k1-600m --set data.sources.train=TEXT \\
      --set data.sources.validation=TEXT --set data.tokenizer=TOKENIZER_JSON

TEXT is a .txt, .jsonl or .jsonl.xz file or a folder of such, and TOKENIZER_JSON a tokenizer of at
most 150,000 entries. MODEL-600m (15B tokens) and MODEL-2b (100B), MODEL one of sse-n4k1, sse-n4k2,
transformer, gla, gdn, gla-h and sse-h; sse-swa-h has the pattern of the paper's converted 12B
model, and mom-n4k1-800m and mom-n4k2-800m are mixtures of memories. No model has convolutions. The
paper does not print the vocabulary, the widths of channel mixers (inferred from its sums), nor the
positions of softmax attention (rotary here) and the widths of gated DeltaNet (those of SSE here).
Measured: 629,837,824 parameters (docs/configs.md has all); none has been trained.
"""

from typing import Any, NamedTuple

from train.config import Data, Model, Optimizer, Train

SEQ_LEN = 8192
TOKENS_PER_STEP = 2**22


class Size(NamedTuple):
  """The shape of the models of one half of the table."""

  dim: int
  num_layers: int
  num_heads: int
  channel_hidden: int
  tokens: int


SIZES = {
  "600m": Size(1024, 24, 8, 2816, 15_000_000_000),
  "2b": Size(2304, 18, 18, 7424, 100_000_000_000),
}
SIZES["800m"] = SIZES["600m"]  # of which the memories of MoM make 800M
ATTENTION = {"softmax_attention": {"max_length": SEQ_LEN}}


def _hybrid(mixer: str) -> tuple[tuple[str, ...], dict[str, Any]]:
  """Softmax attention after every five layers."""
  return (mixer,) * 5 + ("softmax_attention",), ATTENTION


# {model: (mixer, its options)}; n4k2: a token uses two of four partitions.
MODELS: dict[str, tuple[str | tuple[str, ...], dict[str, Any]]] = {
  "sse-n4k1": ("sse", {}),
  "sse-n4k2": ("sse", {"num_selected": 2}),
  "transformer": ("softmax_attention", ATTENTION["softmax_attention"]),
  "gla": ("gla", {}),
  "gdn": ("gated_delta_net", {"expand_v": 1, "conv_size": None}),
  "gla-h": _hybrid("gla"),
  "sse-h": _hybrid("sse"),
  "sse-swa-h": (("sse", "sliding_window_attention") * 2 + ("softmax_attention",), ATTENTION),
  "mom-n4k1": ("mom", {"num_selected": 1}),
  "mom-n4k2": ("mom", {"num_selected": 2}),
}
# {name: (model, size)}
VARIANTS = {
  f"{model}-{size}": (model, size)
  for model in MODELS
  for size in (("800m",) if model.startswith("mom") else ("600m", "2b"))
}


def get_config(variant: str) -> Train:
  """A run of SSE (Pan et al. 2025), table 1: sequences of 8,192, 4M tokens per step."""
  model, size = VARIANTS[variant]
  mixer, options = MODELS[model]
  dim, num_layers, num_heads, hidden, tokens = SIZES[size]
  steps = tokens // TOKENS_PER_STEP
  return Train(
    model=Model(
      mixer=mixer,
      mixer_options=options,
      channel_mixer="swiglu",
      channel_hidden=hidden,
      norm="rms",
      embedding_norm=False,
      dim=dim,
      num_layers=num_layers,
      num_heads=num_heads,
      vocab_size=150_000,
      remat="dots",
    ),
    optimizer=Optimizer(
      peak_lr=6e-4,
      final_lr=6e-4,
      schedule="constant",
      warmup_steps=steps // 20,
      b1=0.9,
      b2=0.95,
      weight_decay=0.1,
      clip_norm=1.0,
    ),
    data=Data(
      folder="data/sse",
      tokenizer="data/tokenizer.json",
      train=("train",),
      validation=("validation",),
    ),
    run_dir=f"runs/sse-{variant}",
    seq_len=SEQ_LEN,
    global_batch=TOKENS_PER_STEP // SEQ_LEN,
    accumulate=64,
    steps=steps,
    eval_every=200,
    checkpoint_every=200,
  )

"""The LNSSM paper's language models: the LNSSM of 72M parameters and those that it compares with.

    python -m train fit --config configs/lnssm_72m.py --set data.sources.train=TEXT \\
      --set data.sources.validation=TEXT --set data.tokenizer=TOKENIZER_JSON

TEXT is a .txt, .jsonl or .jsonl.xz file or a folder of such (the paper uses SlimPajama), and
TOKENIZER_JSON a tokenizer of at most 50,277 entries. `lnssm_72m.py:rwkv4`, `:rwkv5`, `:mamba2` and
`:transformer` (rotary positions) have other token mixers in the same model; with `-original` they
have their own channel mixers, as in the paper's figure 1. An epoch is 555 steps of 18 sequences of
1,024 tokens, a run 500 epochs, 5.1B tokens. The paper does not give heads and widths of the others:
here they are those of their published code, and Mamba-2 without channel mixers has 12 layers.
Measured: 1,145,000 tokens/s of the LNSSM on one H200, 8.9 s for 10.24M tokens; the whole run has
not been trained (docs/performance.md).
"""

from typing import Any

from train.config import Data, Model, Optimizer, Train

STEPS_PER_EPOCH = 555  # 10,000 sequences are 555 full batches of 18

# {name: settings of the model}
VARIANTS: dict[str, dict[str, Any]] = {
  "lnssm": {},
  "rwkv4": {"mixer": "rwkv4"},
  "rwkv5": {"mixer": "rwkv5", "num_heads": 8},
  "mamba2": {"mixer": "mamba2"},
  "transformer": {"mixer": "softmax_attention", "num_heads": 8},
  "rwkv4-original": {"mixer": "rwkv4", "channel_mixer": "rwkv4_channel_mix"},
  "rwkv5-original": {
    "mixer": "rwkv5",
    "num_heads": 8,
    "channel_mixer": "rwkv4_channel_mix",
    "channel_hidden": 1792,  # 3.5 D
  },
  "mamba2-original": {"mixer": "mamba2", "channel_mixer": "none", "num_layers": 12},
}


def get_config(variant: str) -> Train:
  """A run of the LNSSM paper's language-modeling experiments."""
  usual: dict[str, Any] = {"mixer": "lnssm", "channel_mixer": "gpt2"}
  usual |= {"num_layers": 6, "num_heads": 4}
  return Train(
    model=Model(dim=512, vocab_size=50_277, dtype="bfloat16", **(usual | VARIANTS[variant])),
    optimizer=Optimizer(
      peak_lr=8e-4,
      final_lr=1e-5,
      schedule="exponential",
      b1=0.9,
      b2=0.99,
      eps=1e-8,
      logit_penalty=1e-4,
    ),
    data=Data(
      folder="data/lnssm_72m",
      tokenizer="data/tokenizer.json",
      train=("train",),
      validation=("validation",),
      boundaries="ignore",
      order="random_crops",
      weighting="documents",  # cut to 1,024 tokens
    ),
    run_dir=f"runs/lnssm_72m-{variant}",
    seq_len=1024,
    global_batch=18,
    loss_chunk=4608,
    steps=500 * STEPS_PER_EPOCH,
    log_every=50,
    eval_every=10 * STEPS_PER_EPOCH,
    checkpoint_every=10 * STEPS_PER_EPOCH,
  )

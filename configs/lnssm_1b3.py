"""An LNSSM of 1.37B parameters, 24 layers of width 2,048, for 100B tokens: for several GPUs.

    python -m train fit --config configs/lnssm_1b3.py --set data.sources.train=TEXT \\
      --set data.sources.validation=TEXT --set data.tokenizer=TOKENIZER_JSON --set mesh.fsdp=8

TEXT is a .txt, .jsonl or .jsonl.xz file or a folder of such, and TOKENIZER_JSON a tokenizer of at
most 32,000 entries. Depth, width, vocabulary, tokens and learning rates are those of the 1.3B
models of GLA's paper (Yang et al. 2024), section 5.1. A microbatch has 64 sequences over all GPUs.
Measured: 1,374,658,560 parameters; it has not been trained.
"""

from train.config import Data, Model, Optimizer, Train

STEPS = 47_684  # 100B tokens
TOKENS_PER_STEP = 1024 * 2048


def get_config() -> Train:
  """The LNSSM at the size of the literature's 1.3B models."""
  return Train(
    model=Model(
      mixer="lnssm",
      channel_mixer="gpt2",
      tie_embeddings=True,
      dim=2048,
      num_layers=24,
      num_heads=16,
      vocab_size=32_000,
      dtype="bfloat16",
      remat="dots",
    ),
    optimizer=Optimizer(
      peak_lr=3e-4,
      final_lr=3e-5,
      schedule="cosine",
      warmup_steps=10**9 // TOKENS_PER_STEP,
      b1=0.9,
      b2=0.95,
      weight_decay=0.01,
      clip_norm=1.0,
      logit_penalty=1e-4,
    ),
    data=Data(
      folder="data/lnssm_1b3",
      tokenizer="data/tokenizer.json",
      train=("train",),
      validation=("validation",),
    ),
    run_dir="runs/lnssm_1b3",
    seq_len=2048,
    global_batch=1024,
    accumulate=16,
    steps=STEPS,
    eval_every=1000,
    checkpoint_every=1000,
    loss_chunk=4096,
  )

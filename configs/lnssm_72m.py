"""The paper's training of the 72M-parameter LNSSM: 500 epochs of 10M tokens, 5.1B in all.

    python -m train fit --config configs/lnssm_72m.py --set data.sources.train=TEXT \\
      --set data.sources.validation=TEXT --set data.tokenizer=TOKENIZER_JSON

TEXT is a .txt, .jsonl or .jsonl.xz file or a folder of such (the paper uses SlimPajama), and
TOKENIZER_JSON a tokenizer of at most 50,277 entries. An epoch is 555 steps of 18 sequences of 1,024
tokens. Measured: 906,000 tokens/s on one H200, 11.3 s for 10.24M tokens; the 5.1B would take
about 1.6 hours; the whole run has not been trained (docs/kernels.md).
"""

from train.config import Data, Model, Optimizer, Train

STEPS_PER_EPOCH = 555  # 10,000 sequences are 555 full batches of 18


def get_config() -> Train:
  """The run of the LNSSM paper's language-modeling experiments."""
  return Train(
    model=Model(
      mixer="lnssm",
      channel_mixer="gpt2",
      dim=512,
      num_layers=6,
      num_heads=4,
      vocab_size=50_277,
      dtype="bfloat16",
    ),
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
    ),
    run_dir="runs/lnssm_72m",
    seq_len=1024,
    global_batch=18,
    loss_chunk=4608,
    steps=500 * STEPS_PER_EPOCH,
    log_every=50,
    eval_every=10 * STEPS_PER_EPOCH,
    checkpoint_every=10 * STEPS_PER_EPOCH,
  )

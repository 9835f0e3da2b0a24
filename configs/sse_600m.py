"""The SSE paper's language model of 600M parameters; by --set its GLA and Transformer.

    python -m train fit --config configs/sse_600m.py --set data.sources.train=TEXT \\
      --set data.sources.validation=TEXT --set data.tokenizer=TOKENIZER_JSON

TEXT is a .txt, .jsonl or .jsonl.xz file or a folder of such, and TOKENIZER_JSON a tokenizer of at
most 150,000 entries. Four partitions, of which a token uses one (n4k1 in the paper's table 1); two:
`--set model.mixer_options.num_selected=2`. GLA: `--set model.mixer=gla`; the Transformer: `--set
model.mixer=softmax_attention --set model.mixer_options.max_length=8192`. The paper gives 24 layers
of 1,024 with 8 heads and 300M parameters without embeddings; the vocabulary and the width of the
channel mixer are inferred from its sums. Measured: 629,837,824 parameters, of which 307,200,000 are
embeddings and head; 616,136,704 with GLA, and 615,531,520 as a Transformer. The 2B baselines have
1,998,173,952 and 1,997,155,584 (`sse_2b.py` with the same settings). The runs have not been made.
"""

from train.config import Data, Model, Optimizer, Train

VOCABULARY = 150_000
TOKENS_PER_BATCH = 2**22
TOKENS = 15_000_000_000


def get_config() -> Train:
  """The 600M run of SSE (Pan et al. 2025), table 1: sequences of 8,192, 4M tokens per step."""
  steps, seq_len = TOKENS // TOKENS_PER_BATCH, 8192
  return Train(
    model=Model(
      mixer="sse",
      channel_mixer="swiglu",
      norm="rms",
      embedding_norm=False,
      dim=1024,
      num_layers=24,
      num_heads=8,
      vocab_size=VOCABULARY,
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
      logit_penalty=0.0,
    ),
    data=Data(
      folder="data/sse_600m",
      tokenizer="data/tokenizer.json",
      train=("train",),
      validation=("validation",),
    ),
    run_dir="runs/sse_600m",
    seq_len=seq_len,
    global_batch=TOKENS_PER_BATCH // seq_len,
    accumulate=64,
    steps=steps,
    eval_every=200,
    checkpoint_every=200,
  )

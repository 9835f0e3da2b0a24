"""The language models of the DSF paper on WikiText-103: Pythia-70M with other token mixers.

    python -m train fit --config configs/dsf_wikitext103.py:softmax --set data.sources.train=TEXT \\
      --set data.sources.validation=TEXT --set data.tokenizer=TOKENIZER_JSON

TEXT is a .txt, .jsonl or .jsonl.xz file or a folder of such (the paper uses WikiText-103), and
TOKENIZER_JSON Pythia's tokenizer (50,277 entries; the models have 50,304). The paper compares
softmax, linear and normalized; s6 and ssd are its other two systems, with a state of 64 numbers per
channel, as a head's keys have. Its batch, context and learning rates are not known: these are ours,
of 50 epochs of 118M tokens; dropout is that of the paper's other experiments, the start of S6 and
SSD the one of their constructors. Pythia adds attention and channel mixer to the same input; here
they follow one another.
Measured: 70,426,624 parameters with softmax, as Pythia-70M has; none has been trained.
`experiments/sweeps/lm_normalization.py` has these shapes on other text, for 20M tokens.
"""

from typing import Any

from train.config import Data, Model, Optimizer, Train

SEQ_LEN, BATCH = 1024, 128
STEPS = 50 * 118_000_000 // (SEQ_LEN * BATCH)

# {name: (mixer, its options)}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
  "softmax": (
    "softmax_attention",
    {"rotary_width": 16, "use_bias": True, "max_length": SEQ_LEN, "attention_dropout": 0.1},
  ),
  "linear": ("linear_attention", {"attention_dropout": 0.1}),
  "normalized": ("normalized_attention", {"attention_dropout": 0.1}),
  "s6": ("s6", {"state_dim": 64}),
  "ssd": ("ssd", {"state_dim": 64}),
}


def get_config(variant: str) -> Train:
  """A run of DSF (Sieber et al. 2024), table 1."""
  mixer, options = VARIANTS[variant]
  return Train(
    model=Model(
      mixer=mixer,
      mixer_options=options,
      channel_mixer="gpt2",
      channel_mixer_options={"use_bias": True},
      embedding_norm=False,
      embedding_dropout=0.1,
      dim=512,
      num_layers=6,
      num_heads=8,
      vocab_size=50_304,
    ),
    optimizer=Optimizer(
      peak_lr=1e-3,
      final_lr=1e-4,
      schedule="cosine",
      warmup_steps=STEPS // 10,
      b1=0.9,
      b2=0.95,
      weight_decay=0.1,
      clip_norm=1.0,
    ),
    data=Data(
      folder="data/dsf_wikitext103",
      tokenizer="data/tokenizer.json",
      train=("train",),
      validation=("validation",),
    ),
    run_dir=f"runs/dsf_wikitext103-{variant}",
    seq_len=SEQ_LEN,
    global_batch=BATCH,
    accumulate=8,
    steps=STEPS,
    eval_every=1000,
    checkpoint_every=1000,
  )

"""Longhorn's language model of 128.6M parameters on OpenWebText, as its paper trains it.

    python -m train fit --config configs/longhorn_128m.py --set data.sources.train=TEXT \\
      --set data.sources.validation=TEXT --set data.tokenizer=TOKENIZER_JSON

TEXT is a .txt, .jsonl or .jsonl.xz file or a folder of such, and TOKENIZER_JSON GPT-2's tokenizer
(50,257 entries; the model's vocabulary is 50,304). 4,800 steps of 0.49M tokens. The paper's larger
model (370M): `--set model.num_layers=48 --set model.dim=1024 --set optimizer.peak_lr=3e-4 --set
optimizer.warmup_steps=675 --set steps=13500`; its Mamba (129.2M): `--set model.mixer=mamba`;
its GLA (123.8M): `--set model.mixer=gla --set model.channel_mixer=swiglu --set model.num_layers=12
--set model.num_heads=4`; its LLaMA: the same with `model.mixer=softmax_attention` and 12 heads
(123.6M; the table prints 124.4M).
Measured: 128,563,968 parameters; it has not been trained.
"""

from train.config import Data, Model, Optimizer, Train

STEPS = 4800


def get_config() -> Train:
  """The 120M run of Longhorn (Liu et al. 2024), table 2: twice the layers of a Transformer."""
  return Train(
    model=Model(
      mixer="longhorn",
      channel_mixer="none",
      norm="rms",
      embedding_norm=False,
      tie_embeddings=True,
      dim=768,
      num_layers=24,
      num_heads=1,  # without meaning for this mixer
      vocab_size=50_304,
      remat="dots",
    ),
    optimizer=Optimizer(
      peak_lr=6e-4,
      final_lr=6e-5,
      schedule="cosine",
      warmup_steps=STEPS // 20,
      b1=0.9,
      b2=0.95,
      weight_decay=0.1,
      clip_norm=1.0,
      logit_penalty=0.0,
    ),
    data=Data(
      folder="data/longhorn_128m",
      tokenizer="data/gpt2_tokenizer.json",
      train=("train",),
      validation=("validation",),
    ),
    run_dir="runs/longhorn_128m",
    seq_len=1024,
    global_batch=480,
    accumulate=8,
    steps=STEPS,
    eval_every=200,
    checkpoint_every=200,
  )

"""The DSF paper's models of multi-query associative recall: 2 layers, 64 to 512 wide.

    python -m experiments mqar --config experiments/configs/mqar.py:linear
    python -m experiments mqar --config experiments/configs/mqar.py:ssd --set model.dim=256 \\
      --set model.mixer_options.state_dim=64 --set seq_len=512 --set global_batch=64 --pairs 64

The paper's tasks have 64, 128, 256 and 512 tokens with 4, 8, 16 and 64 pairs, and batches of 512,
256, 128 and 64 rows; states of 32 to 256 numbers; 64 epochs of 100,000 rows at most. The learning
rate is the command's (`--learning-rates`). Channel mixers are those of its released runs: none for
S6 and SSD, the norm of the stream alone for all others, but an MLP for normalized attention;
`--set model.channel_mixer=gpt2` and `=identity` are the controls.
Measured: nothing; none has been trained to its end. `experiments/sweeps/mqar_dsf.py` is smaller.
"""

from typing import Any

from train.config import Data, Model, Optimizer, Train

LENGTH, BATCH, EPOCHS, ROWS = 64, 512, 64, 100_000
STEPS = EPOCHS * (ROWS // BATCH)

DROPOUT: dict[str, Any] = {"attention_dropout": 0.1}
RUN: dict[str, Any] = {"state_dim": 64, "initialization": "as_run"}
PLACED: dict[str, Any] = {"learned_positions": 512, "channel_mixer": "identity"}
MLP: dict[str, Any] = {"channel_mixer": "gpt2", "channel_mixer_options": {"use_bias": True}}
ALONE: dict[str, Any] = {"channel_mixer": "none"}
# {name: (mixer, its options, other settings of the model)}
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
  "linear": ("linear_attention", DROPOUT, PLACED),
  "softmax": ("softmax_attention", DROPOUT | {"positions": "none", "use_bias": True}, PLACED),
  "normalized": ("normalized_attention", DROPOUT, PLACED | MLP),
  "s6": ("s6", RUN, ALONE),
  "ssd": ("ssd", RUN, ALONE),
  "qlstm": ("qlstm", {}, PLACED),
  "qlstm_reversed": ("qlstm_reversed", {}, PLACED),
}


def get_config(variant: str) -> Train:
  """A model of DSF (Sieber et al. 2024), figures 2 to 4, as Zoology's code trains it."""
  mixer, options, others = VARIANTS[variant]
  return Train(
    model=Model(
      mixer=mixer,
      mixer_options=options,
      embedding_norm=False,
      embedding_dropout=0.1,
      initialization="gpt2",
      tie_embeddings=True,
      dim=128,
      num_layers=2,
      num_heads=1,
      vocab_size=8192,
      dtype="float32",
      **others,
    ),
    optimizer=Optimizer(
      peak_lr=1e-3,
      final_lr=0.0,
      schedule="cosine",
      b1=0.9,
      b2=0.999,
      weight_decay=0.1,
    ),
    data=Data(folder="-", tokenizer="-", train=("mqar",)),  # the rows are drawn
    run_dir=f"runs/mqar-{variant}",
    seq_len=LENGTH,
    global_batch=BATCH,
    steps=STEPS,
    eval_every=STEPS,
    checkpoint_every=STEPS,
  )

"""The LCSM paper's language models on WikiText-103: 44M parameters, and its sweep of codes.

    python -m train fit --config configs/lcsm_wikitext103.py --set data.sources.train=TEXT \\
      --set data.sources.validation=TEXT --set model.mixer_options.code=1-2-1-4

TEXT is a .txt, .jsonl or .jsonl.xz file or a folder of such (the paper uses WikiText-103); a BPE of
50,265 entries is trained on it, or `--set data.tokenizer=TOKENIZER_JSON`. 3.3B tokens. SWEEP holds
the paper's rows: settings to override, and what it reports. Its channel mixers are not known. Here
they are SwiGLU, as wide as gives the printed parameters (docs/lcsm.md). Measured: 46,067,200
parameters, for 46.07M printed. The runs have not been made.
"""

from typing import Any, NamedTuple

from train.config import Data, Model, Optimizer, Train

DIM, LAYERS = 512, 6


class Row(NamedTuple):
  """A row of the paper's tables on WikiText-103."""

  options: dict[str, Any]  # of the mixer
  channel_hidden: int
  millions: float | None  # of parameters, as printed
  perplexity: tuple[float, float]  # validation and test, as printed

  @property
  def settings(self) -> list[str]:
    """The overrides of this config, as `--set` takes them."""
    options = [f"model.mixer_options.{name}={value}" for name, value in self.options.items()]
    return [*options, f"model.channel_hidden={self.channel_hidden}"]


def _row(code, hidden, millions, validation, test, **options):
  return Row({"code": code, **options}, hidden, millions, (validation, test))


SWEEP: list[Row] = [
  _row("0-0-0-0", 1451, 43.45, 29.62, 30.5),
  _row("0-0-0-0", 1493, None, 28.26, 29.1, learned=False),
  _row("0-0-1-0", 1451, None, 28.23, 29.07),
  _row("0-1-0-0", 1344, 44.04, 25.89, 26.61),
  _row("0-1-1-0", 1344, None, 25.36, 26.21),
  _row("1-0-0-0", 1451, None, 27.94, 28.77),
  _row("1-0-1-0", 1451, None, 26.12, 26.65),
  _row("1-1-0-0", 1344, None, 24.24, 24.91),
  _row("1-1-1-0", 1344, 44.04, 24.26, 24.75),
  _row("1-2-1-0", 1323, 43.45, 29.27, 29.77),
  _row("1-3-1-0", 1451, 43.45, 28.22, 28.86),
  _row("1-4-1-0", 1607, 44.50, 27.55, 28.21),
  _row("1-5-1-0", 1608, 44.51, 29.01, 29.82),
  _row("1-6-1-0", 1480, 44.11, 25.02, 25.48),
  _row("1-7-1-0", 1344, 44.04, 24.82, 25.17),
  _row("1-8-1-0", 1323, 43.45, 24.71, 25.08),
  _row("1-9-1-0", 1451, 43.46, 24.23, 24.54),
  _row("1-10-1-0", 1493, 43.45, 29.91, 30.31),
  _row("1-11-1-0", 1565, 44.11, 28.6, 29.36),
  _row("0", 1476, 43.78, 27.41, 27.99),
  _row("1-1-1-0", 1564, 46.07, 23.78, 24.97),
  _row("1-1-1-1", 1564, 46.07, 22.85, 23.3),
  _row("1-1-1-2", 1564, 46.07, 23.04, 23.61),
  _row("1-1-1-3", 1564, 46.07, 22.92, 23.47),
  _row("1-1-1-4", 1564, 46.07, 22.73, 23.22),
  _row("1-1-1-5", 1564, 46.07, 23.31, 23.7),
  _row("1-1-1-6", 1564, 46.07, 22.8, 23.32),
  _row("1-1-1-7", 1564, 46.07, 23.77, 23.91),
  _row("1-10-1-1", 1493, 43.45, 27.02, 27.44),
  _row("1-10-1-2", 1493, 43.45, 26.77, 27.37),
  _row("1-10-1-3", 1493, 43.45, 26.82, 27.6),
  _row("1-10-1-4", 1493, 43.45, 27.28, 27.58),
  _row("1-10-1-5", 1493, 43.45, 28.64, 28.98),
  _row("1-10-1-6", 1493, 43.45, 26.68, 27.18),
  _row("1-10-1-7", 1493, 43.45, 28.08, 28.63),
  _row("1-1-1-0", 1344, None, 25.77, 26.24, gate_logit_normalizer=1.0),
  _row("1-1-1-0", 1344, None, 24.8, 25.29, gate_logit_normalizer=2.0),
  _row("1-1-1-0", 1344, None, 23.98, 24.53, gate_logit_normalizer=4.0),
  _row("1-1-1-0", 1344, None, 23.53, 24.0, gate_logit_normalizer=8.0),
  _row("1-1-1-0", 1344, None, 25.1, 25.36, gate_logit_normalizer=32.0),
  _row("1-1-1-0", 1344, None, 24.58, 24.96, gate_logit_normalizer=64.0),
]


def get_config() -> Train:
  """Code 1-1-1-4, the best of the paper's rows; LCSM (Qin et al. 2024), section 4."""
  return Train(
    model=Model(
      mixer="lcsm",
      mixer_options={"code": "1-1-1-4", "state_dim": 128},
      channel_mixer="swiglu",
      channel_hidden=1564,
      embedding_norm=False,
      tie_embeddings=True,
      dim=DIM,
      num_layers=LAYERS,
      num_heads=1,
      vocab_size=50_265,
    ),
    optimizer=Optimizer(
      peak_lr=5e-4,
      final_lr=0.0,
      schedule="inverse_sqrt",
      warmup_steps=4000,
      b1=0.9,
      b2=0.98,
      eps=1e-8,
      weight_decay=0.1,
    ),
    data=Data(
      folder="data/lcsm_wikitext103",
      tokenizer="bpe:50265",
      train=("train",),
      validation=("validation",),
    ),
    run_dir="runs/lcsm_wikitext103",
    seq_len=512,
    global_batch=128,
    steps=50_000,
    log_every=50,
    eval_every=2500,
    checkpoint_every=2500,
  )

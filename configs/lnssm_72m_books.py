"""The 72M-parameter LNSSM on 50M tokens of books, PEPs, web pages and textbooks.

    LNSSM_DATA=FOLDER python -m train fit --config configs/lnssm_72m_books.py

FOLDER has lm/{train,val}_*.jsonl.xz (rows with a key "text") and tokenizers/20B_tokenizer.json
(50,277 entries). The training text is 22.2M tokens, so the run has a little over two epochs. It is
validated on unseen documents of three of the sources and, out of domain, on WikiText-103.
Measured: 2 min 30 s on one H200; 1.50 bits per byte on books, 1.44 on PEPs, 1.79 on OpenWebText,
2.24 on WikiText-103 (docs/results/training.md).
"""

import os
from pathlib import Path

from train.config import ConfigError, Data, Model, Optimizer, Sample, Train

TRAIN = ("books", "peps", "openwebtext", "openstax")
VALIDATION = ("books", "peps", "openwebtext", "wikitext103")
TOKENS = 50_000_000


def get_config() -> Train:
  """One run of about 50M tokens: 2,712 steps of 18 sequences of 1,024."""
  if not os.environ.get("LNSSM_DATA"):
    raise ConfigError(
      "configs/lnssm_72m_books.py needs the environment variable LNSSM_DATA: the folder with"
      " lm/train_books.jsonl.xz and so on, and tokenizers/20B_tokenizer.json."
    )
  root = Path(os.environ["LNSSM_DATA"])
  train = tuple(f"train_{name}" for name in TRAIN)
  validation = tuple(f"val_{name}" for name in VALIDATION)
  seq_len, global_batch = 1024, 18  # the paper's
  return Train(
    model=Model(dim=512, num_layers=6, num_heads=4, vocab_size=50_277, dtype="bfloat16"),
    optimizer=Optimizer(peak_lr=8e-4, final_lr=1e-5, logit_penalty=1e-4),
    data=Data(
      folder="data/lnssm_72m_books",
      tokenizer=str(root / "tokenizers" / "20B_tokenizer.json"),
      train=train,
      validation=validation,
      sources={name: str(root / "lm" / f"{name}.jsonl.xz") for name in (*train, *validation)},
    ),
    run_dir="runs/lnssm_72m_books",
    seq_len=seq_len,
    global_batch=global_batch,
    loss_chunk=4608,
    steps=TOKENS // (seq_len * global_batch),
    log_every=10,
    eval_every=400,
    checkpoint_every=1000,
    sample=Sample(prompt="The ", tokens=200),
  )

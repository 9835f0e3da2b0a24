"""The tiny run of these benchmarks: one layer of width 32 on generated text; and its losses."""

import random
from pathlib import Path

from train.config import Data, Mesh, Model, Optimizer, Sample, Train
from train.runs.run_folder import RunFolder

WORDS = ("the", "slow", "quick", "river", "stone", "moves", "over", "under", "bright", "night")


def settings(root: Path, name: str, **changes) -> Train:
  """Config of a run in `root/name`; creates the text in `root` once."""
  text = root / "text.txt"
  if not text.exists():
    rng = random.Random(0)
    text.write_text("".join(" ".join(rng.choices(WORDS, k=40)) + ".\n" for _ in range(400)))
  values = {
    "model": Model(dim=32, num_layers=1, num_heads=2, vocab_size=257, dtype="float32"),
    "optimizer": Optimizer(peak_lr=3e-3, final_lr=3e-4),
    "data": Data(
      folder=str(root / "tokens"), tokenizer="bytes", train=("train",), sources={"train": str(text)}
    ),
    "mesh": Mesh(data=1),
    "run_dir": str(root / name),
    "seq_len": 32,
    "global_batch": 8,
    "steps": 2000,
    "log_every": 1,
    "eval_every": 10**9,
    "checkpoint_every": 20,
    "sample": Sample(tokens=0),
  }
  return Train(**values | changes)


def curve(cfg: Train) -> dict[int, tuple[float, float, float]]:
  """{step: (loss, gradient norm, parameter norm)} from metrics.jsonl, exact."""
  rows = RunFolder(cfg.run_dir).read_rows()
  numbers = ("loss", "grad_norm", "param_norm")
  return {r["step"]: tuple(r[n] for n in numbers) for r in rows if r["kind"] == "train"}

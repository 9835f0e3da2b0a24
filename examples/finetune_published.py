"""Trains a published checkpoint further on a text, and writes it for its own project to open.

    python examples/finetune_published.py mamba-130m-hf notes.txt --out mamba-notes --steps 100

FOLDER has config.json, safetensors files and tokenizer.json, as downloaded. Norms, biases and the
embedding stay as they are; the rest is trained.
"""

import argparse
import pathlib

import jax
import numpy as np
import optax
from flax import nnx

from lnssm_jax import pretrained


def is_trained(path: tuple, value: object) -> bool:
  """Whether a parameter is a matrix of a layer."""
  return isinstance(value, nnx.Param) and "kernel" in path and "blocks" in path


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folder")
  parser.add_argument("text", type=pathlib.Path)
  parser.add_argument("--out", required=True)
  parser.add_argument("--layout", default="hf", choices=["hf", "fla", "mamba_ssm"])
  parser.add_argument("--steps", type=int, default=100)
  parser.add_argument("--rows", type=int, default=4)
  parser.add_argument("--length", type=int, default=256)
  parser.add_argument("--learning-rate", type=float, default=1e-4)
  options = parser.parse_args()

  loaded = pretrained.load(options.folder)
  model = loaded.model
  tokens = np.array(loaded.tokenizer.encode(options.text.read_text()), np.int32)
  if len(tokens) <= options.length:
    parser.error(f"{options.text} has {len(tokens)} tokens; --length must be less")
  print("trained:", sum(x.size for x in jax.tree.leaves(nnx.state(model, is_trained))), "numbers")

  def loss_fn(model, rows):
    logits, _ = model(rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

  @nnx.jit
  def train_step(model, optimizer, rows):
    trained = nnx.DiffState(0, is_trained)
    loss, gradients = nnx.value_and_grad(loss_fn, argnums=trained)(model, rows)
    optimizer.update(model, gradients)
    return loss

  transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(options.learning_rate))
  optimizer = nnx.Optimizer(model, transformation, wrt=is_trained)
  rng = np.random.default_rng(0)
  for step in range(options.steps):
    starts = rng.integers(len(tokens) - options.length, size=options.rows)
    rows = np.stack([tokens[start : start + options.length + 1] for start in starts])
    loss = train_step(model, optimizer, rows)
    if step % 10 == 0 or step == options.steps - 1:
      print(f"step {step}: {float(loss):.3f} nats per token")

  pretrained.save(options.out, model, loaded.settings["model"], layout=options.layout)
  print(f"written to {options.out}")


if __name__ == "__main__":
  main()

"""Trains a small GLA on Python's own sources with Flax NNX and optax, without the trainer.

python examples/own_training_loop.py --steps 200
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lnssm_jax import models
from lnssm_jax.generate import SamplingOptions, generate

LENGTH = 256


def packed_batch(documents: list[bytes], rng: np.random.Generator, rows: int) -> dict:
  """Rows of `LENGTH + 1` bytes cut from random documents, several in a row.

  `segment_ids` number the documents, so that no state passes from one to the next.
  """
  tokens = np.zeros((rows, LENGTH + 1), np.int32)
  ids = np.zeros_like(tokens)
  for row in range(rows):
    filled, number = 0, 0
    while filled <= LENGTH:
      document = documents[rng.integers(len(documents))]
      start = rng.integers(len(document))
      piece = np.frombuffer(document[start : start + LENGTH + 1 - filled], np.uint8)
      tokens[row, filled : filled + len(piece)] = piece
      ids[row, filled : filled + len(piece)] = number
      filled, number = filled + len(piece), number + 1
  return {"tokens": tokens, "segment_ids": ids}


def loss_fn(model: models.LanguageModel, batch: dict) -> jax.Array:
  """Nats per byte, of bytes that the same document predicts."""
  tokens, ids = batch["tokens"], batch["segment_ids"]
  logits, _ = model(tokens[:, :-1], segment_ids=ids[:, :-1])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
  weights = ids[:, :-1] == ids[:, 1:]
  return jnp.sum(losses * weights) / jnp.sum(weights)


@nnx.jit
def train_step(model: models.LanguageModel, optimizer: nnx.Optimizer, batch: dict) -> jax.Array:
  loss, gradients = nnx.value_and_grad(loss_fn)(model, batch)
  optimizer.update(model, gradients)
  return loss


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=200)
  parser.add_argument("--rows", type=int, default=8)
  parser.add_argument("--dim", type=int, default=128)
  options = parser.parse_args()

  sources = sorted(pathlib.Path(argparse.__file__).parent.glob("*.py"))
  documents = [content for path in sources if (content := path.read_bytes())]
  rng = np.random.default_rng(0)

  # Under jit, initialization is one program instead of one for each parameter.
  model = nnx.jit(
    lambda: models.LanguageModel(
      vocab_size=256, dim=options.dim, num_layers=2, num_heads=2, mixer="gla", rngs=nnx.Rngs(0)
    )
  )()
  rate = optax.warmup_cosine_decay_schedule(0.0, 4e-3, options.steps // 10, options.steps)
  transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
  optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
  for step in range(options.steps):
    loss = train_step(model, optimizer, packed_batch(documents, rng, options.rows))
    if step % 20 == 0 or step == options.steps - 1:
      print(f"step {step}: {float(loss):.3f} nats per byte")

  (row,) = generate(model, [list(b"def ")], SamplingOptions(max_tokens=40, seed=1))
  print(bytes(row.tolist()).decode(errors="replace"))


if __name__ == "__main__":
  main()

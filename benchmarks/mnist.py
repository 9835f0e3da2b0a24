"""A smoke run of `VisionModel`: MNIST digits, minutes on a CPU.

    python -m benchmarks.mnist --data FOLDER/mnist_uint8.npz --mixer longhorn

The file holds uint8 arrays: pixels train_x and test_x [B, 28, 28], labels train_y and test_y [B].
Prints the loss as it trains, then the share of the test images that are classified rightly.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lnssm_jax.models import VisionModel, count_parameters


def images_of(array):
  """[B, 28, 28] uint8 -> [B, 28, 28, 1] float32 of mean 0."""
  return (jnp.asarray(array, jnp.float32) / 255 - 0.13)[..., None] / 0.31


def main(arguments=None) -> float:
  """Trains, prints, and returns the accuracy on the test images."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--data", required=True)
  parser.add_argument("--mixer", default="longhorn")
  parser.add_argument("--steps", type=int, default=300)
  parser.add_argument("--batch", type=int, default=128)
  parser.add_argument("--test", type=int, default=10_000, help="test images")
  args = parser.parse_args(arguments)
  with np.load(args.data) as file:
    data = dict(file)
  sizes = {"image_size": 28, "patch_size": 4, "channels": 1, "num_classes": 10}
  sizes |= {"dim": 64, "num_layers": 2, "num_heads": 4, "mixer": args.mixer}
  graph, params = nnx.split(VisionModel(**sizes, rngs=nnx.Rngs(0)), nnx.Param)
  print(f"{args.mixer}: {count_parameters(params):,} parameters")
  schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, args.steps // 10, args.steps)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.05))

  def loss(params, images, labels):
    logits = nnx.merge(graph, params)(images_of(images))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  @jax.jit
  def step(params, state, images, labels):
    value, gradients = jax.value_and_grad(loss)(params, images, labels)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value

  state, rng, begin = tx.init(params), np.random.default_rng(0), time.perf_counter()
  for number in range(1, args.steps + 1):
    rows = rng.integers(0, len(data["train_x"]), args.batch)
    batch = data["train_x"][rows], data["train_y"][rows].astype(np.int32)
    params, state, value = step(params, state, *batch)
    if number % 50 == 0 or number == args.steps:
      print(f"step {number}  loss {value:.4f}  {time.perf_counter() - begin:.0f} s", flush=True)

  predict = jax.jit(lambda params, images: nnx.merge(graph, params)(images_of(images)).argmax(-1))
  right = 0
  for first in range(0, args.test, 500):
    part = slice(first, min(first + 500, args.test))
    right += int((predict(params, data["test_x"][part]) == data["test_y"][part]).sum())
  accuracy = right / min(args.test, len(data["test_x"]))
  print(f"test accuracy {accuracy:.4f}")
  return accuracy


if __name__ == "__main__":
  main()

"""One mixer as a layer of a Linen model: a classifier that reads a sequence once.

    python examples/mixer_in_a_flax_model.py --steps 40

A sequence is letters with one mark among them, and ends with a question: which mark was it? The
last output knows only if the recurrent state has carried the mark to the end.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from lnssm_jax import linen

CLASSES, LENGTH, LETTERS = 4, 48, 8
QUESTION = LETTERS + CLASSES


class Classifier(nn.Module):
  """Embedding, a residual mixer, and a head on the last token."""

  dim: int = 64

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    """tokens [B, T] to logits [B, CLASSES]."""
    x = nn.Embed(QUESTION + 1, self.dim)(tokens)
    mixed, _ = linen.GatedDeltaNet(self.dim, num_heads=2, name="mixer")(nn.RMSNorm()(x))
    return nn.Dense(CLASSES)(nn.RMSNorm()((x + mixed)[:, -1]))


def batch(key: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
  """Tokens [B, T] and the mark in each row, [B]."""
  letters, places, marks = jax.random.split(key, 3)
  tokens = jax.random.randint(letters, (rows, LENGTH), 0, LETTERS)
  mark = jax.random.randint(marks, (rows,), 0, CLASSES)
  place = jax.random.randint(places, (rows,), 0, LENGTH - 1)
  tokens = tokens.at[jnp.arange(rows), place].set(LETTERS + mark)
  return tokens.at[:, -1].set(QUESTION), mark


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=40)
  parser.add_argument("--rows", type=int, default=64)
  options = parser.parse_args()

  model = Classifier()
  keys = jax.random.split(jax.random.key(0), options.steps + 2)
  params = jax.jit(model.init)(keys[-1], batch(keys[-1], 1)[0])
  optimizer = optax.adam(3e-3)
  state = optimizer.init(params)

  def loss_fn(params, tokens, labels):
    logits = model.apply(params, tokens)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

  @jax.jit
  def train_step(params, state, key):
    loss, gradients = jax.value_and_grad(loss_fn)(params, *batch(key, options.rows))
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, loss

  for step in range(options.steps):
    params, state, loss = train_step(params, state, keys[step])
    if step % 20 == 0:
      print(f"step {step}: loss {float(loss):.3f}")

  tokens, labels = batch(keys[-2], 256)
  predicted = jnp.argmax(jax.jit(model.apply)(params, tokens), axis=-1)
  print(f"accuracy {float(jnp.mean(predicted == labels)):.3f}, chance {1 / CLASSES}")


if __name__ == "__main__":
  main()

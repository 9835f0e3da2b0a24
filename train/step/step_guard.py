"""Guard of the training step: skips updates that are not finite and, optionally, spikes.

A skipped step changes neither the parameters, nor Adam's moments, nor averages and statistics; the
learning rate and the data position advance. The decision is made on the device, inside the compiled
step. A step without targets, all of whose weights are 0, is skipped too: it says nothing about the
model, so it is no failure and does not count towards `max_skipped`.

Spikes: let x = (loss, gradient norm), with running means m and variances v over the steps that were
not skipped. A step is a spike if, for either component,

    x > m + deviations * sqrt(v),      m += w (x - m),   v = (1 - w) (v + w (x - m)^2)

where w = 1 / min(n, HISTORY) after n steps: cumulative averages first, then exponential ones. The
first HISTORY steps only update the statistics.
"""

import jax
import jax.numpy as jnp

HISTORY = 128

Statistics = dict[str, jax.Array]


def init_statistics() -> Statistics:
  """Statistics before the first step: `mean`, `variance` float32 [2], `count` int32 []."""
  # Two buffers: a step that donates them rejects one buffer under two names.
  mean, variance = (jnp.zeros(2, jnp.float32) for _ in range(2))
  return {"mean": mean, "variance": variance, "count": jnp.int32(0)}


def is_finite(loss: jax.Array, grad_norm: jax.Array) -> jax.Array:
  """Whether an update is finite, as a boolean scalar.

  The norm is a float32 sum of squares: if it is finite, so are Adam's second moments.
  """
  return jnp.isfinite(loss) & jnp.isfinite(grad_norm)


def count_failures(failures: jax.Array, metrics: dict[str, jax.Array]) -> jax.Array:
  """Failed steps in a row up to this one, and the most ever: int32 [2] before and after a step."""
  has_targets, skipped = metrics["tokens"] > 0, metrics["skipped"] > 0
  now = jnp.where(has_targets, jnp.where(skipped, failures[0] + 1, 0), failures[0])
  return jnp.stack([now, jnp.maximum(failures[1], now)])


def is_spike(seen: Statistics, loss: jax.Array, grad_norm: jax.Array, deviations: float):
  """Whether a step is a spike relative to the steps before it, as a boolean scalar."""
  limit = seen["mean"] + deviations * jnp.sqrt(seen["variance"])
  exceeds = (jnp.stack([loss, grad_norm]) > limit).any()
  return exceeds & (seen["count"] >= HISTORY)


def update_statistics(seen: Statistics, loss: jax.Array, grad_norm: jax.Array) -> Statistics:
  """Adds one step to the statistics."""
  count = seen["count"] + 1
  weight = 1 / jnp.minimum(count, HISTORY).astype(jnp.float32)
  delta = jnp.stack([loss, grad_norm]) - seen["mean"]
  return {
    "mean": seen["mean"] + weight * delta,
    "variance": (1 - weight) * (seen["variance"] + weight * delta**2),
    "count": count,
  }

"""Which training steps are left out: those that are not finite and, by option, spikes.

A step that is left out changes neither the parameters nor Adam's moments; the learning rate and the
position in the data go on. All of it is decided on the device, inside the compiled step.

Of spikes: with x = (loss, gradient norm) and running means m and variances v of the steps that
counted, a step is a spike where, for either of the two,

    x > m + deviations * sqrt(v),      m += w (x - m),   v = (1 - w) (v + w (x - m)^2)

and w = 1 / min(n, HISTORY) after n steps: plain averages at first, then exponential ones. The first
HISTORY steps are only watched.
"""

import jax
import jax.numpy as jnp

HISTORY = 128

Statistics = dict[str, jax.Array]


def start() -> Statistics:
  """The statistics before the first step: `mean`, `variance` float32 [2], `count` int32 []."""
  zeros = jnp.zeros(2, jnp.float32)
  return {"mean": zeros, "variance": zeros, "count": jnp.int32(0)}


def is_finite(loss: jax.Array, grad_norm: jax.Array) -> jax.Array:
  """Whether an update is safe: boolean scalar.

  The norm sums squares in float32, so a finite one also keeps Adam's second moments finite.
  """
  return jnp.isfinite(loss) & jnp.isfinite(grad_norm)


def is_spike(seen: Statistics, loss: jax.Array, grad_norm: jax.Array, deviations: float):
  """Whether a step stands out from those before it: boolean scalar."""
  limit = seen["mean"] + deviations * jnp.sqrt(seen["variance"])
  stands_out = (jnp.stack([loss, grad_norm]) > limit).any()
  return stands_out & (seen["count"] >= HISTORY)


def watch(seen: Statistics, loss: jax.Array, grad_norm: jax.Array) -> Statistics:
  """The statistics with one step more."""
  count = seen["count"] + 1
  weight = 1 / jnp.minimum(count, HISTORY).astype(jnp.float32)
  delta = jnp.stack([loss, grad_norm]) - seen["mean"]
  return {
    "mean": seen["mean"] + weight * delta,
    "variance": (1 - weight) * (seen["variance"] + weight * delta**2),
    "count": count,
  }

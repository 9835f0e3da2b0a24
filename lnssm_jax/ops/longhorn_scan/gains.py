"""Gains and decays of the Longhorn update, without cancellation.

With n = ‖k‖², r_i = Σ_{j≠i} k_j² and w = 1 / (1 + β n),

    gain   ε   = β w
    decay  a_i = 1 - ε k_i² = w + ε r_i

The first form of the decay loses all its digits where one entry dominates a large key, the second
some of them where the decay is near 1. The derivatives lose theirs by the chain rule, which
subtracts β n from 1 + β n. Below, no difference loses a digit.
"""

import jax
import jax.numpy as jnp


@jax.custom_jvp
def gain_and_decay(
  beta: jax.Array,  # [..., D]
  k: jax.Array,  # [..., N]
) -> tuple[jax.Array, jax.Array]:
  """ε [..., D] and the decays [..., D, N], which are in (0, 1] also after rounding."""
  squares = k * k
  inverse = 1 / (1 + beta * jnp.sum(squares, axis=-1, keepdims=True))
  gain = beta * inverse
  lost = gain[..., None] * squares[..., None, :]
  kept = inverse[..., None] + gain[..., None] * sum_of_others(squares)[..., None, :]
  return gain, jnp.where(lost <= 0.5, 1 - lost, kept)


@gain_and_decay.defjvp
def _jvp(primals, tangents):
  (beta, k), (d_beta, d_k) = primals, tangents
  gain, decay = gain_and_decay(beta, k)
  inverse = 1 / (1 + beta * jnp.sum(k * k, axis=-1, keepdims=True))
  d_squares = 2 * k * d_k
  d_gain = inverse * inverse * d_beta - gain * gain * jnp.sum(d_squares, axis=-1, keepdims=True)

  gain_of, inverse_of, d_beta_of = gain[..., None], inverse[..., None], d_beta[..., None]
  squares, d_own = (k * k)[..., None, :], d_squares[..., None, :]
  d_others = sum_of_others(d_squares)[..., None, :]
  lost = gain_of * squares
  d_decay = lost * gain_of * d_others - gain_of * decay * d_own
  return (gain, decay), (d_gain, d_decay - inverse_of * squares * inverse_of * d_beta_of)


def sum_of_others(values):
  """[..., N] -> [..., N]: the sum of all entries but one's own. Not a difference of sums."""
  size = values.shape[-1]
  without_own = jnp.ones((size, size), values.dtype) - jnp.eye(size, dtype=values.dtype)
  return jnp.einsum("...j,ji->...i", values, without_own, precision="highest")

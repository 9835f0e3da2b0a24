"""Relative positions by features."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import wide


def cosine_features(
  x: jax.Array,  # [B, T, H, K]
  positions: jax.Array,  # [B, T] integer
  theta: jax.Array | float,  # [H, K] or one number, radians per token
) -> jax.Array:
  """(x cos(t theta), x sin(t theta)), [B, T, H, 2 K] in float32 at least.

  The product of those of q at t and of k at s is sum_i q_i k_i cos((t - s) theta_i).
  """
  x = wide(x)
  angle = positions[..., None, None].astype(x.dtype) * jnp.asarray(theta, x.dtype)
  return jnp.concatenate([x * jnp.cos(angle), x * jnp.sin(angle)], axis=-1)

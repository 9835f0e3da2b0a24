"""The sigmoid of gates, for kernels that compute in registers."""

import jax.numpy as jnp
from jax import lax

_MIN_EXPONENT = -80.0  # below it x sigmoid(x) is 0 to 1e-33, and exp(-x) would overflow


def sigmoid(x):
  """1 / (1 + exp(-x)), without a branch, which a division would be."""
  root = lax.rsqrt(1.0 + jnp.exp(-jnp.maximum(x, _MIN_EXPONENT)))
  return root * root

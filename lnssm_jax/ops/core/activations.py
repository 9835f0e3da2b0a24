"""Activations with derivatives that follow from their results."""

import jax
import jax.numpy as jnp


@jax.custom_jvp
def softplus(z: jax.Array) -> jax.Array:
  """log(1 + exp(z)). z: any shape and float dtype, as is the result.

  A scan keeps the result for its own gradient. The argument, as large an array in float32, which
  JAX's derivative reads, is not kept.
  """
  return jax.nn.softplus(z)


@softplus.defjvp
def _softplus_jvp(primals, tangents):
  (z,), (dz,) = primals, tangents
  y = softplus(z)
  return y, -jnp.expm1(-y) * dz

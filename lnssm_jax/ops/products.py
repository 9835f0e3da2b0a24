"""Matrix products in the accuracy that the scans promise."""

import jax
import jax.numpy as jnp


def product(equation: str, left: jax.Array, right: jax.Array, dtype) -> jax.Array:
  """`jnp.einsum` of operands rounded to `dtype`, with sums in float32 (float64 for float64).

  float32 operands are multiplied at full accuracy. float16 operands are widened to float32, for
  states and features may exceed its range.
  """
  if jnp.dtype(dtype) == jnp.float16:
    dtype = jnp.float32
  wide = jnp.result_type(jnp.float32, dtype)
  precision = jax.lax.Precision.HIGHEST if dtype == wide else None
  left, right = left.astype(dtype), right.astype(dtype)
  return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=wide)

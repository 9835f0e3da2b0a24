"""Norms as written, for XLA to fuse."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import accumulation_dtype
from lnssm_jax.ops.norms.types import Inputs, Options


def reference(inputs: Inputs, options: Options):
  """(y, x + added)."""
  x, added, scale, bias, gate = inputs
  total = x if added is None else x + added
  acc = accumulation_dtype(*jax.tree.leaves(inputs))
  z = total.astype(acc)
  silu = None if gate is None else jax.nn.silu(gate.astype(acc))
  z = z * silu if silu is not None and options.gate_first else z
  if options.center:
    z = z - jnp.mean(z, axis=-1, keepdims=True)
  square = jnp.mean(jnp.square(z), axis=-1, keepdims=True)
  if options.floor is None:
    # Scale first, as in flax: recorded losses are reproduced to the bit.
    inverse = jax.lax.rsqrt(square + options.eps)
    y = z * (inverse if scale is None else inverse * scale.astype(acc))
  else:
    # The maximum is taken under the root: the derivative of sqrt(square) is 0 / 0 at x = 0.
    y = z / (jnp.sqrt(jnp.maximum(square, options.floor**2)) + options.eps)
    y = y if scale is None else scale.astype(acc) * y
  y = y if options.factor == 1 else y * options.factor
  y = y if bias is None else y + bias.astype(acc)
  y = y if silu is None or options.gate_first else y * silu
  return y.astype(options.dtype), total

"""Activations and output gates."""

import functools
import math

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import accumulation_dtype, wide


@jax.custom_jvp
def exact_gelu(x: jax.Array) -> jax.Array:
  """x Phi(x), Phi the normal distribution function, by erf. x: any shape and float dtype, as is y.

  Its derivative, in float32 at least and rounded once, is written out because jax 0.12 cannot
  differentiate erf inside `jax.shard_map`. Source: GELU (Hendrycks and Gimpel 2016), section 2.
  """
  return jax.nn.gelu(x, approximate=False)


@exact_gelu.defjvp
def _exact_gelu_jvp(primals, tangents):
  (x,), (dx,) = primals, tangents
  acc = wide(x)
  density = jnp.exp(-0.5 * acc * acc) / math.sqrt(2 * math.pi)
  slope = 0.5 * jax.lax.erfc(-acc * math.sqrt(0.5)) + acc * density
  return exact_gelu(x), slope.astype(x.dtype) * dx


GELUS = {"exact": exact_gelu, "tanh": functools.partial(jax.nn.gelu, approximate=True)}


def silu_gate(y: jax.Array, gate: jax.Array) -> jax.Array:
  """y * silu(gate), in float32 at least: the caller rounds it, once."""
  acc = accumulation_dtype(y, gate)
  return y.astype(acc) * jax.nn.silu(gate.astype(acc))


def log_gate(z: jax.Array, normalizer: float) -> jax.Array:
  """log(sigmoid(z)^(1 / normalizer)), at most 0, in float32 at least."""
  return jax.nn.log_sigmoid(wide(z)) / normalizer


def feature_dtype(dtype) -> jnp.dtype:
  """Returns the dtype of features that grow like exp or a square: float32 in place of float16.

  bfloat16 has the range of float32.
  """
  return jnp.dtype(jnp.float32) if jnp.dtype(dtype) == jnp.float16 else jnp.dtype(dtype)

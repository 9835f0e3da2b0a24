"""Activations and output gates."""

import functools
import math

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.precision import accumulation_dtype, wide

# Phi(-u) = exp(-u^2 / 2) P(1 / (u + 3.26)) with a relative error of 4.5e-6 for u from 0 to 13.6. P,
# from t^6 to t, is the minimax fit (Lawson's iteration in float64) that is exact at u = 0.75179,
# where the derivative of gelu(-u) is 0.
_TAIL_SHIFT = 3.26
_TAIL = (-91.74955, 71.990948, 0.21114776, 4.7973073, 1.2532042, 0.39986726)


def _tail(u):
  """Phi(-u) exp(u^2 / 2) for u >= 0. The form is 7.1.26 of Abramowitz and Stegun (1964)."""
  t = 1 / (u + _TAIL_SHIFT)
  polynomial = _TAIL[0] * t
  for coefficient in _TAIL[1:]:
    polynomial = (polynomial + coefficient) * t
  return polynomial


def _power(x):
  return jnp.exp(-0.5 * x * x)


def _normal_density(x):
  return _power(x) / math.sqrt(2 * math.pi)


@jax.custom_jvp
def _short_normal_cdf(x):
  """Phi(x) in float32 for a result of 16 bits. XLA merges its exp with that of the density."""
  tail = _power(x) * _tail(jnp.abs(x))
  return jnp.where(x < 0, tail, 1 - tail)


@_short_normal_cdf.defjvp
def _short_normal_cdf_jvp(primals, tangents):
  (x,), (dx,) = primals, tangents
  return _short_normal_cdf(x), _normal_density(x) * dx


@jax.custom_jvp
def exact_gelu(x: jax.Array) -> jax.Array:
  """x Phi(x), Phi the normal distribution function. x: any shape and float dtype, as is y.

  In bfloat16 and float16, y and the derivative are computed in float32 and rounded once, with less
  than half the instructions of erfc. In bfloat16 they are within 0.501 units in the last place of
  the exact numbers; those below 1e-37 may be 0. In float32 and float64 they are those of erfc.

  The derivative is written out because jax 0.12 cannot differentiate erf inside `jax.shard_map`.
  Source: GELU (Hendrycks and Gimpel 2016), section 2.
  """
  acc = wide(x)
  if acc.dtype == x.dtype:
    return jax.nn.gelu(x, approximate=False)
  # Unlike the Phi of the derivative: XLA would merge the two, and keep Phi in float32 for the
  # backward pass. gelu(-14) rounds to 0, and inf * 0 would be NaN.
  u = jnp.minimum(jnp.abs(acc), 14)
  return (jnp.maximum(acc, 0) - _power(u) * (u * _tail(u))).astype(x.dtype)


@exact_gelu.defjvp
def _exact_gelu_jvp(primals, tangents):
  (x,), (dx,) = primals, tangents
  acc = wide(x)
  density = _normal_density(acc)
  exact = acc.dtype == x.dtype
  cdf = 0.5 * jax.lax.erfc(-acc * math.sqrt(0.5)) if exact else _short_normal_cdf(acc)
  slope = cdf + acc * density
  return exact_gelu(x), slope.astype(x.dtype) * dx


GELUS = {"exact": exact_gelu, "tanh": functools.partial(jax.nn.gelu, approximate=True)}


def silu_gate(y: jax.Array, gate: jax.Array) -> jax.Array:
  """y * silu(gate), in float32 at least: the caller rounds it, once."""
  # Both gradients are made before one is used: otherwise XLA reads their inputs twice.
  y, gate = jax.lax.optimization_barrier((y, gate))
  acc = accumulation_dtype(y, gate)
  return y.astype(acc) * jax.nn.silu(gate.astype(acc))


# As of `softplus` (ops/core), the derivative follows from the result.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def log_gate(z: jax.Array, normalizer: float) -> jax.Array:
  """log(sigmoid(z)^(1 / normalizer)), at most 0, in float32 at least."""
  return jax.nn.log_sigmoid(wide(z)) / normalizer


@log_gate.defjvp
def _log_gate_jvp(normalizer, primals, tangents):
  (z,), (dz,) = primals, tangents
  y = log_gate(z, normalizer)
  return y, jnp.expm1(normalizer * y) * (-1 / normalizer) * dz.astype(y.dtype)


def feature_dtype(dtype) -> jnp.dtype:
  """Returns the dtype of features that grow like exp or a square: float32 in place of float16.

  bfloat16 has the range of float32.
  """
  return jnp.dtype(jnp.float32) if jnp.dtype(dtype) == jnp.float16 else jnp.dtype(dtype)

"""Norms of mixers and models, over the last axis, in float32 at least: the caller rounds, once."""

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.ops.core.precision import wide


def rms_norm(x: jax.Array, scale: jax.Array | None = None, *, eps: float = 1e-5) -> jax.Array:
  """scale * x / sqrt(mean(x^2) + eps). Its gradient is at most about 1 / sqrt(eps)."""
  x = wide(x)
  x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
  return x if scale is None else scale.astype(x.dtype) * x


def rms_norm_with_floor(x: jax.Array, scale: jax.Array, *, eps: float, floor: float) -> jax.Array:
  """scale * x / (max(rms(x), floor) + eps), rms = sqrt(mean(x^2)); `floor` bounds the gradient.

  The maximum is taken under the root: the derivative of sqrt(mean(x^2)) is 0 / 0 at x = 0.
  """
  x = wide(x)
  mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  return scale.astype(x.dtype) * (x / (jnp.sqrt(jnp.maximum(mean_square, floor**2)) + eps))


def layer_norm(
  x: jax.Array,
  scale: jax.Array | None = None,
  bias: jax.Array | None = None,
  *,
  eps: float = 1e-5,
) -> jax.Array:
  """scale * (x - mean) / sqrt(variance + eps) + bias."""
  x = wide(x)
  x = x - jnp.mean(x, axis=-1, keepdims=True)
  x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
  x = x if scale is None else x * wide(scale)
  return x if bias is None else x + wide(bias)


def unit_norm(x: jax.Array, *, eps: float = 1e-6) -> jax.Array:
  """x / sqrt(sum(x^2) + eps): an l2 norm of at most 1."""
  x = wide(x)
  return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
  """`rms_norm` with a learned `scale` [size], 1 at first."""

  def __init__(self, size: int, *, eps: float = 1e-5, param_dtype=jnp.float32):
    self.eps = eps
    self.scale = nnx.Param(jnp.ones(size, param_dtype))

  def __call__(self, x: jax.Array) -> jax.Array:
    return rms_norm(x, self.scale[...], eps=self.eps)


class LayerNorm(nnx.Module):
  """`layer_norm` with a learned `scale` and `bias` [size], 1 and 0 at first."""

  def __init__(self, size: int, *, eps: float = 1e-5, param_dtype=jnp.float32):
    self.eps = eps
    self.scale = nnx.Param(jnp.ones(size, param_dtype))
    self.bias = nnx.Param(jnp.zeros(size, param_dtype))

  def __call__(self, x: jax.Array) -> jax.Array:
    return layer_norm(x, self.scale[...], self.bias[...], eps=self.eps)


def _model_layer_norm(dim: int, *, param_dtype, rngs: nnx.Rngs) -> nnx.LayerNorm:
  return nnx.LayerNorm(
    dim,
    epsilon=1e-5,
    dtype=jnp.float32,
    param_dtype=param_dtype,
    use_fast_variance=False,
    rngs=rngs,
  )


def _model_rms_norm(dim: int, *, param_dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
  return nnx.RMSNorm(dim, epsilon=1e-5, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)


# Norms of a model's residual stream, by name: eps 1e-5, in float32 throughout. "layer" has a scale
# and a bias, "rms" a scale. They are flax's, which multiply the scale into 1 / sigma first: their
# last bit differs from that of the norms above, and recorded losses are reproduced to the bit.
NORMS = {"layer": _model_layer_norm, "rms": _model_rms_norm}

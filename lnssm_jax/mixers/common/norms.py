"""Norms of mixers and models, over the last axis: `ops.normalize` by its usual names.

They compute in float32 at least and round once, to `dtype`; None leaves the rounding to the caller.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common.checks import check_norm_eps
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.norms.api import normalize


def rms_norm(
  x: jax.Array, scale: jax.Array | None = None, *, eps: float = 1e-5, dtype=None
) -> jax.Array:
  """scale * x / sqrt(mean(x^2) + eps). Its gradient is at most about 1 / sqrt(eps)."""
  return normalize(x, scale, eps=eps, dtype=dtype)[0]


def rms_norm_with_floor(
  x: jax.Array, scale: jax.Array | None, *, eps: float, floor: float, dtype=None
) -> jax.Array:
  """scale * x / (max(rms(x), floor) + eps), rms = sqrt(mean(x^2)); `floor` bounds the gradient."""
  return normalize(x, scale, eps=eps, floor=floor, dtype=dtype)[0]


def layer_norm(x: jax.Array, *, eps: float = 1e-5, dtype=None) -> jax.Array:
  """(x - mean) / sqrt(variance + eps)."""
  return normalize(x, center=True, eps=eps, dtype=dtype)[0]


def unit_norm(x: jax.Array, *, eps: float = 1e-6, dtype=None) -> jax.Array:
  """x / sqrt(sum(x^2) + eps): an l2 norm of at most 1."""
  D = x.shape[-1]
  return normalize(x, eps=eps / D, factor=D**-0.5, dtype=dtype)[0]


class Norm(nnx.Module):
  """`ops.normalize` with learned parameters [size]: a `scale`, 1 at first, and perhaps a `bias`.

  With use_scale=False it has neither.
  """

  center: bool
  has_bias: bool
  offset = 0.0  # added to the stored scale

  def __init__(
    self,
    size: int,
    *,
    eps: float = 1e-5,
    use_scale: bool = True,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs | None = None,
  ):
    self.eps = check_norm_eps(eps)
    self.scale = nnx.Param(jnp.full(size, 1 - self.offset, param_dtype)) if use_scale else None
    has_bias = use_scale and self.has_bias
    self.bias = nnx.Param(jnp.zeros(size, param_dtype)) if has_bias else None
    if rngs is not None:
      # Flax's norms draw a key per parameter. Models had those, and what follows a norm in a model
      # should start from the same numbers for the same seed.
      for _ in range(1 + self.has_bias):
        rngs.params()

  def __call__(
    self, x: jax.Array, *, gate: jax.Array | None = None, gate_first: bool = False, dtype=None
  ) -> jax.Array:
    """The norm of x [..., size], times silu(gate); x is, with `gate_first`."""
    return self._normalize(x, gate=gate, gate_first=gate_first, dtype=dtype)[0]

  def per_head(
    self, x: jax.Array, *, gate: jax.Array | None = None, gate_first: bool = False, dtype=None
  ) -> jax.Array:
    """The norm of each head of x [..., H, size / H], with its own part of scale and bias."""
    options = {"gate": gate, "gate_first": gate_first, "dtype": dtype}
    return self._normalize(x, shape=x.shape[-2:], **options)[0]

  def add(self, x: jax.Array, added: jax.Array | None, dtype=None) -> tuple[jax.Array, jax.Array]:
    """(the norm of x + added, x + added), from which the residual stream continues."""
    return self._normalize(x, added=added, dtype=dtype)

  def _normalize(self, x, shape=(-1,), **options):
    value = lambda p: None if p is None else p[...].reshape(shape)
    options |= {"center": self.center, "eps": self.eps}
    scale = value(self.scale)
    if self.offset and scale is not None:
      scale = self.offset + wide(scale)
    return normalize(x, scale, value(self.bias), **options)


class RMSNorm(Norm):
  """scale * x / sqrt(mean(x^2) + eps)."""

  center = has_bias = False


class RMSNormFromZero(RMSNorm):
  """(1 + scale) * x / sqrt(mean(x^2) + eps), with the scale 0 at first: Gemma's norm."""

  offset = 1.0


class LayerNorm(Norm):
  """scale * (x - mean) / sqrt(variance + eps) + bias."""

  center = has_bias = True


class LayerNormWithoutBias(LayerNorm):
  """scale * (x - mean) / sqrt(variance + eps), as in nanoGPT with bias=False."""

  has_bias = False


# Norms of a model's residual stream, by name.
NORMS: dict[str, type[Norm]] = {
  "layer": LayerNorm,
  "layer_without_bias": LayerNormWithoutBias,
  "rms": RMSNorm,
  "rms_from_zero": RMSNormFromZero,
}

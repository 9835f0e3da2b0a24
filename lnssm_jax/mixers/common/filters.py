"""Filters of long convolutions, computed from the lag by a small network."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common.initializers import uniform_fan_in
from lnssm_jax.ops.core.precision import wide


class _Affine(nnx.Module):
  """W x + b in float32, whatever the precision of the projections."""

  def __init__(self, inputs: int, outputs: int, *, use_bias: bool, param_dtype, rngs: nnx.Rngs):
    init = uniform_fan_in(inputs)
    self.kernel = nnx.Param(init(rngs.params(), (inputs, outputs), param_dtype))
    self.bias = nnx.Param(init(rngs.params(), (outputs,), param_dtype)) if use_bias else None

  def __call__(self, x: jax.Array) -> jax.Array:
    y = jnp.matmul(x, wide(self.kernel[...]), precision="highest")
    return y if self.bias is None else y + wide(self.bias[...])


class FilterNetwork(nnx.Module):
  """[L, F] features of L lags -> [L, D] taps; float32. Kernels start uniform within 1 / sqrt(F).

  Args:
    sizes: F, the widths of the hidden layers, D.
    last_bias: whether the last layer has a bias.
  """

  def __init__(self, sizes: Sequence[int], *, last_bias: bool = True, param_dtype, rngs: nnx.Rngs):
    self.num_layers = len(sizes) - 1
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
      use_bias = last_bias or i < self.num_layers - 1
      layer = _Affine(inputs, outputs, use_bias=use_bias, param_dtype=param_dtype, rngs=rngs)
      setattr(self, f"layer{i}", layer)

  def __call__(self, features: jax.Array, activation: Callable[[jax.Array], jax.Array]):
    """Applies the layers, with `activation` between them."""
    y = features
    for i in range(self.num_layers):
      y = getattr(self, f"layer{i}")(activation(y) if i else y)
    return y


def lag_features(max_length: int) -> jax.Array:
  """[L, 3]: l / (L - 1), and the cosine and minus the sine of 1e-4 times 2 pi l / L.

  With three features only the slowest frequency is used. Source: Hyena's published code.
  """
  lag = jnp.arange(max_length, dtype=jnp.float32)
  angle = 1e-4 * 2 * jnp.pi * lag / max_length
  share = lag / max(max_length - 1, 1)
  return jnp.stack([share, jnp.cos(angle), -jnp.sin(angle)], axis=1)

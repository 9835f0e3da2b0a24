"""Linear layers with their biases, and heads."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common.checks import check_heads
from lnssm_jax.ops.core.precision import wide

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


class Linear(nnx.Linear):
  """W x in `dtype`; with a bias W x + b, added in float32 at least: the caller rounds it, once.

  Args:
    inputs, outputs: the sizes of `kernel` [inputs, outputs] and `bias` [outputs].
    kernel_init: initial kernel.
    bias_init: initial bias, drawn after the kernel; "zeros" draws nothing. None: no bias.
  """

  def __init__(
    self,
    inputs: int,
    outputs: int,
    *,
    kernel_init: Initializer,
    bias_init: Initializer | Literal["zeros"] | None = None,
    dtype,
    param_dtype,
    rngs: nnx.Rngs,
  ):
    super().__init__(
      inputs,
      outputs,
      use_bias=False,
      kernel_init=kernel_init,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    if bias_init == "zeros":
      self.bias = nnx.Param(jnp.zeros(outputs, param_dtype))
    elif bias_init is not None:
      self.draw_bias(bias_init, rngs)

  def draw_bias(self, bias_init: Initializer, rngs: nnx.Rngs) -> None:
    """Adds a random bias."""
    self.bias = nnx.Param(bias_init(rngs.params(), (self.out_features,), self.param_dtype))

  def __call__(self, x: jax.Array) -> jax.Array:
    """[..., inputs] -> [..., outputs]."""
    y = self.product(x)
    return y if self.bias is None else wide(y) + wide(self.bias[...])

  def product(self, x: jax.Array) -> jax.Array:
    """W x in `dtype`, without the bias."""
    x, kernel = x.astype(self.dtype), self.kernel[...].astype(self.dtype)
    return self.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


class BlockDiagonal(nnx.Module):
  """x -> W x + b with W of square blocks: kernel [blocks, E / blocks, E / blocks], bias [E].

  Args:
    std: the kernel starts normal with this standard deviation; None means 1 / sqrt(inputs).
  """

  def __init__(
    self,
    width: int,
    num_blocks: int,
    *,
    use_bias: bool = True,
    std: float | None = None,
    dtype,
    param_dtype,
    rngs: nnx.Rngs,
  ):
    block = check_heads(width, num_blocks)
    self.num_blocks, self.dtype = num_blocks, dtype
    kernel = jax.random.normal(rngs.params(), (num_blocks, block, block))
    self.kernel = nnx.Param((kernel * (block**-0.5 if std is None else std)).astype(param_dtype))
    self.bias = nnx.Param(jnp.zeros(width, param_dtype)) if use_bias else None

  def __call__(self, x: jax.Array) -> jax.Array:
    kernel = self.kernel[...].astype(self.dtype)
    y = jnp.einsum("bthi,hij->bthj", split_heads(x, self.num_blocks), kernel)
    y = wide(merge_heads(y))
    return y if self.bias is None else y + wide(self.bias[...])


def split_linear(layer: Linear, x: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
  """Returns the outputs of a layer, split into parts of these widths.

  A wide part is a product of its own: a kernel reads whole arrays, and slicing a larger product
  would copy it. Narrow parts next to each other are one: for each product x is read and a gradient
  of its size written. A single token makes one product: there the weights would be copied.
  """
  narrow = lambda width: x.shape[1] == 1 or 4 * width <= layer.in_features
  runs = [list(run) for _, run in itertools.groupby(widths, narrow)]
  groups = [g for run in runs for g in ([run] if narrow(run[0]) else [[width] for width in run])]
  x, kernel = (y.astype(layer.dtype) for y in (x, layer.kernel[...]))
  outputs = []
  for group, part in zip(groups, _split(kernel, map(sum, groups)), strict=True):
    y = layer.dot_general(x, part, (((x.ndim - 1,), (0,)), ((), ())))
    outputs += _split(y, group) if len(group) > 1 else [y]
  if layer.bias is None:
    return outputs
  biases = _split(wide(layer.bias[...]), widths)
  return [wide(y) + bias for y, bias in zip(outputs, biases, strict=True)]


def _split(x: jax.Array, widths: Iterable[int]) -> list[jax.Array]:
  """x [..., E] in parts of these widths."""
  return jnp.split(x, list(itertools.accumulate(widths))[:-1], axis=-1)


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
  """[B, T, D] -> [B, T, H, D / H]."""
  return x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads)


def merge_heads(x: jax.Array) -> jax.Array:
  """[B, T, H, K] -> [B, T, H K]."""
  return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])

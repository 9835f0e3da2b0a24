"""Channel mixers: what a block does to each token by itself, [..., D] -> [..., D]."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_positive
from lnssm_jax.mixers.initializers import orthogonal


class GPT2MLP(nnx.Module):
  """W_down gelu(W_up x) with the exact (erf) GELU, a hidden width of 4 D, and no biases.

  Both kernels start orthogonal, with gain sqrt(out / in) where the output is the wider side.
  Sources: GPT-2 (Radford et al. 2019); without biases and with this initialisation, the LNSSM's
  published code.
  """

  def __init__(self, dim: int, *, dtype=jnp.float32, param_dtype=jnp.float32, rngs: nnx.Rngs):
    check_positive("dim", dim)

    def linear(inputs, outputs):
      gain = math.sqrt(max(1.0, outputs / inputs))
      return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        kernel_init=orthogonal(gain),
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
      )

    self.up, self.down = linear(dim, 4 * dim), linear(4 * dim, dim)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down(jax.nn.gelu(self.up(x), approximate=False))


class GatedMLP(nnx.Module):
  """W_down (activation(W_gate x) * W_up x), without biases: `SwiGLU` and `GeGLU`."""

  def __init__(
    self,
    dim: int,
    hidden: int,
    *,
    activation: Callable[[jax.Array], jax.Array],
    kernel_init: jax.nn.initializers.Initializer,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    linear = functools.partial(
      nnx.Linear,
      use_bias=False,
      kernel_init=kernel_init,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.activation = activation
    self.gate, self.up, self.down = linear(dim, hidden), linear(dim, hidden), linear(hidden, dim)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down(self.activation(self.gate(x)) * self.up(x))


class SwiGLU(GatedMLP):
  """W_down (silu(W_gate x) * W_up x) with 8/3 D hidden channels, rounded up to a multiple of 256.

  Kernels start normal with a standard deviation of 0.02, as in GPT-2.
  Sources: Shazeer 2020; the width, LLaMA (Touvron et al. 2023).
  """

  def __init__(self, dim: int, *, dtype=jnp.float32, param_dtype=jnp.float32, rngs: nnx.Rngs):
    check_positive("dim", dim)
    super().__init__(
      dim,
      swiglu_width(dim),
      activation=jax.nn.silu,
      kernel_init=nnx.initializers.normal(0.02),
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )


class GeGLU(GatedMLP):
  """W_down (gelu(W_gate x) * W_up x) with 3 D hidden channels and the exact (erf) GELU.

  Kernels start normal with a variance of 1 / inputs. Sources: Shazeer 2020; the width, Griffin (De
  et al. 2024).
  """

  def __init__(self, dim: int, *, dtype=jnp.float32, param_dtype=jnp.float32, rngs: nnx.Rngs):
    check_positive("dim", dim)
    super().__init__(
      dim,
      3 * dim,
      activation=functools.partial(jax.nn.gelu, approximate=False),
      kernel_init=nnx.initializers.variance_scaling(1.0, "fan_in", "normal"),
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )


def swiglu_width(dim: int) -> int:
  """Hidden channels of `SwiGLU`: 256 ceil(8 D / 768)."""
  return 256 * -(-8 * dim // 768)


# "none": the block has no channel mixer and no norm for one, as in models of Mamba's kind.
CHANNEL_MIXERS: dict[str, type[GPT2MLP] | type[SwiGLU] | type[GeGLU] | None] = {
  "gpt2": GPT2MLP,
  "swiglu": SwiGLU,
  "geglu": GeGLU,
  "none": None,
}

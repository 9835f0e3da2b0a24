"""Channel mixers: what a block does to each token by itself, [..., D] -> [..., D]."""

import math

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


# "none": the block has no channel mixer and no norm for one, as in models of Mamba's kind.
CHANNEL_MIXERS: dict[str, type[GPT2MLP] | None] = {"gpt2": GPT2MLP, "none": None}

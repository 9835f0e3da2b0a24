"""The gated short convolution of LFM2: a few tokens between two gates."""

import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.mixers.common.initializers import uniform_fan_in
from lnssm_jax.mixers.common.projections import Linear, split_linear
from lnssm_jax.mixers.common.short_convolution import ShortConvolution
from lnssm_jax.ops import ConvState


class ShortConv(Mixer[ConvState]):
  r"""A short convolution between two gates, without activations.

      [b_t, c_t, u_t] = W_in x_t,      out_t = W_o (c_t * conv(b * u)_t)

  over W tokens, per channel. The state is the last W - 1 products b_t * u_t, [B, W - 1, D] float32.

  Args:
    dim: D, the width.
    conv_size: W ("conv_L_cache" in transformers).
    use_bias: whether W_in and W_o have biases.
    conv_bias: whether the convolution has one. transformers' `conv_bias` is both.
    dtype: of the projections, of both products and of the convolution's output; its sums and the
      state are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive.

  Source: LFM2 (Liquid AI 2025), `Lfm2ShortConv` of transformers. Kernels start uniform within
  1 / sqrt(inputs); transformers draws them with a standard deviation of 0.02, as
  `LanguageModel(initialization="gpt2")` does.
  """

  name = "short_conv"
  starts_as_model = True
  recurrence_flops = flops.two_gates

  def __init__(
    self,
    dim: int,
    *,
    conv_size: int = 3,
    use_bias: bool = False,
    conv_bias: bool = False,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    init, bias_init = uniform_fan_in(dim), "zeros" if use_bias else None
    linear = lambda n: Linear(dim, n, kernel_init=init, bias_init=bias_init, **options)
    self.in_proj = linear(3 * dim)
    self.conv = ShortConvolution(dim, conv_size, use_bias=conv_bias, **options)
    self.o_proj = linear(dim)

  def _init_state(self, B):
    return self.conv.init_state(B)

  def _mix(self, x, state, segment_ids):
    b, c, u = (y.astype(self.dtype) for y in split_linear(self.in_proj, x, [self.dim] * 3))
    y, state = self.conv(b * u, state, segment_ids)
    return self.o_proj(c * y).astype(self.dtype), state

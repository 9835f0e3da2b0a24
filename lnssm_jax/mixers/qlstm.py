"""The quasi-LSTM: a linear recurrence with data-dependent gates; two forms of the forget gate."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.activations import exact_gelu
from lnssm_jax.mixers.common.checks import check_choice, check_positive
from lnssm_jax.mixers.common.projections import Linear, split_linear
from lnssm_jax.mixers.common.short_convolution import ShortConvolution
from lnssm_jax.ops import ConvState, DiagonalState, diagonal_scan
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state

VARIANTS = ("released", "paper")
EXPONENTS = {"relu": jax.nn.relu, "softplus": jax.nn.softplus}


@register_state
class QLSTMState(NamedTuple):
  """Recurrent state of `QLSTM` and `QLSTMReversed`, float32."""

  conv: ConvState  # inputs [B, W - 1, E]
  recurrent: DiagonalState  # h [B, E]


class QLSTM(Mixer[QLSTMState]):
  r"""Forget, input and output gates that depend on the input only, E = expand D channels wide.

      [g_t, x'_t] = W_in u_t,      x_t = conv(x')_t                      over W tokens, per channel
      [f_t, i_t, o_t] = W_x x_t + b
      h_t = sigmoid(f_t) h_{t-1} + sigmoid(i_t) x_t
      out_t = W_o (gelu(g_t) sigmoid(o_t) h_t)

  gelu is exact. That is the block of the published code. variant="paper" is the layer that the
  paper prints, D channels wide and without convolution, GELU and W_o:

      x_t = tanh(W_in u_t),      [f_t, i_t, o_t] = W_x u_t + b
      h_t = sigmoid(f_t) h_{t-1} + sigmoid(i_t) x_t,      out_t = sigmoid(o_t) tanh(h_t)

  Args:
    dim: D, the width of input and output.
    expand: E / D, with variant="released".
    conv_size: W, with variant="released".
    variant: "released" or "paper".
    dtype: of the projections and of x; gates, decays, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, or `variant` is unknown.

  Source: the DSF paper (Sieber et al. 2024), eq. 8, and its published code, whose layer starts its
  kernels normal with variance 1 / inputs, b at zero, the convolution uniform within 1 / sqrt(W). In
  the paper's runs the model drew all kernels again: `LanguageModel(initialization="gpt2")`.
  """

  name = "qlstm"
  starts_as_model = True
  # The published code divides the start of matrices called `out_proj`; this one is its `output`.
  output_starts_smaller = False
  recurrence_flops = flops.diagonal

  def __init__(
    self,
    dim: int,
    *,
    expand: int = 2,
    conv_size: int = 4,
    variant: str = "released",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    released = check_choice("variant", variant, VARIANTS) == "released"
    self.inner_dim = E = check_positive("expand", expand) * dim if released else dim
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

    def linear(inputs, outputs, **more):
      init = nnx.initializers.normal(inputs**-0.5)
      return Linear(inputs, outputs, kernel_init=init, **more, **options)

    self.in_proj = linear(dim, 2 * E if released else E)
    self.conv = ShortConvolution(E, conv_size if released else None, **options)
    self.x_proj = linear(E, 3 * E, bias_init="zeros")
    self.o_proj = linear(E, dim) if released else None

  def _init_state(self, B):
    h = jnp.zeros((B, self.inner_dim), jnp.float32)
    return QLSTMState(self.conv.init_state(B), DiagonalState(h))

  def _mix(self, x, state, segment_ids):
    conv, recurrent = state if state is not None else (None, None)
    if self.o_proj is None:
      gate, gated = None, x
      inner, conv = jnp.tanh(wide(self.in_proj(x))), self.conv.init_state(x.shape[0])
    else:
      gate, inner = split_linear(self.in_proj, x, [self.inner_dim] * 2)
      inner, conv = self.conv(inner, conv, segment_ids)
      gated = inner
    f, i, o = jnp.split(self.x_proj(gated), 3, axis=-1)
    h, recurrent = diagonal_scan(
      self._decay(f),
      jax.nn.sigmoid(i) * inner,
      **self._place(recurrent, segment_ids),
    )
    state = QLSTMState(conv, recurrent)
    if gate is None or self.o_proj is None:
      return (jax.nn.sigmoid(o) * jnp.tanh(h)).astype(self.dtype), state
    y = exact_gelu(wide(gate)) * jax.nn.sigmoid(o) * h
    return self.o_proj(y.astype(self.dtype)), state

  def _decay(self, f: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(f)


class QLSTMReversed(QLSTM):
  r"""The modified quasi-LSTM: a forget gate of the form that S6 and RG-LRU have.

      h_t = sigmoid(-f_t)^relu(alpha) h_{t-1} + sigmoid(i_t) x_t         alpha [1], 1 at the start

  Everything else is as in `QLSTM`. Since sigmoid(-f)^a = exp(-a softplus(f)), this is S6's decay
  with a step size softplus(f). Once alpha <= 0 nothing decays, and alpha's gradient stays zero;
  exponent="softplus" takes softplus(alpha) instead, with the same value at the start.

  Args:
    exponent: the function that keeps the exponent positive: "relu" (the published code) or
      "softplus". The other arguments are those of `QLSTM`.

  Raises:
    ValueError: a size is not positive, or `exponent` is unknown.

  Source: the DSF paper (Sieber et al. 2024), eq. 22, and its published code.
  """

  name = "qlstm_reversed"

  def __init__(
    self,
    dim: int,
    *,
    expand: int = 2,
    conv_size: int = 4,
    variant: str = "released",
    exponent: str = "relu",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    super().__init__(dim, expand=expand, conv_size=conv_size, variant=variant, **options)
    self.exponent = check_choice("exponent", exponent, EXPONENTS)
    start = 1.0 if exponent == "relu" else jnp.log(jnp.expm1(1.0))
    self.alpha = nnx.Param(jnp.full(1, start, param_dtype))

  def _decay(self, f: jax.Array) -> jax.Array:
    return jnp.exp(-EXPONENTS[self.exponent](wide(self.alpha[...])) * jax.nn.softplus(f))

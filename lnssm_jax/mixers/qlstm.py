"""The quasi-LSTM: a gated linear recurrence whose gates do not see the state; two forget gates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_call, check_choice, check_positive
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.layers import exact_gelu, linear, linear_parts, wide
from lnssm_jax.mixers.short_convolution import ShortConvolution
from lnssm_jax.ops import DiagonalState
from lnssm_jax.ops.sequence_parallel import diagonal_scan

EXPONENTS = {"relu": jax.nn.relu, "softplus": jax.nn.softplus}


class QLSTMState(NamedTuple):
  """What a layer remembers of a sequence. float32."""

  conv: jax.Array  # [B, W - 1, E], the last inputs of the convolution
  memory: DiagonalState  # h [B, E]


class QLSTM(Divisible):
  r"""Forget, input and output gates that depend on the input only, E = expand D channels wide.

      [g_t, x'_t] = W_in u_t,      x_t = conv(x')_t                      over W steps, per channel
      [f_t, i_t, o_t] = W_x x_t + b
      h_t = sigmoid(f_t) h_{t-1} + sigmoid(i_t) x_t
      out_t = W_o (gelu(g_t) sigmoid(o_t) h_t)

  Args:
    dim: D, the width of input and output.
    expand: E / D.
    conv_width: W.
    dtype: of the projections and of x; gates, decays, the state and sums are float32.
    param_dtype: of the parameters.

  gelu is exact. Cutting a sequence anywhere and passing the state on gives the same result as one
  call.

  Raises:
    ValueError: a size is not positive.

  Source: the DSF paper (Sieber et al. 2024), eq. 8, in the block of its published code, which has
  no tanh: kernels start normal with variance 1 / inputs, b at zero, the convolution uniform within
  1 / sqrt(W).
  """

  def __init__(
    self,
    dim: int,
    *,
    expand: int = 2,
    conv_width: int = 4,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.inner_dim = E = check_positive("expand", expand) * dim

    def projection(inputs, outputs):
      init = nnx.initializers.normal(inputs**-0.5)
      return linear(inputs, outputs, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    self.in_proj = projection(dim, 2 * E)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.conv = ShortConvolution(E, conv_width, **options)
    self.x_proj = projection(E, 3 * E)
    self.gate_bias = nnx.Param(jnp.zeros(3 * E, param_dtype))
    self.o_proj = projection(E, dim)

  def init_state(self, batch_size: int) -> QLSTMState:
    """The state before the first token: zeros."""
    B = check_positive("batch_size", batch_size)
    memory = DiagonalState(jnp.zeros((B, self.inner_dim), jnp.float32))
    return QLSTMState(self.conv.init_state(B), memory)

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: QLSTMState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, QLSTMState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    conv, memory = state if state is not None else (None, None)
    gate, inner = linear_parts(self.in_proj, x, [self.inner_dim] * 2)
    inner, conv = self.conv(inner, conv, segment_ids)
    gates = wide(self.x_proj(inner)) + wide(self.gate_bias[...])
    f, i, o = jnp.split(gates, 3, axis=-1)
    h, memory = diagonal_scan(
      self._decay(f),
      jax.nn.sigmoid(i) * inner,
      axis_name=self.sequence_axis,
      initial_state=memory,
      segment_ids=segment_ids,
    )
    y = exact_gelu(wide(gate)) * jax.nn.sigmoid(o) * h
    return self.o_proj(y.astype(self.dtype)), QLSTMState(conv, memory)

  def _decay(self, f: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(f)


class QLSTMReversed(QLSTM):
  r"""The modified quasi-LSTM: a forget gate of the form that S6 and RG-LRU have.

      h_t = sigmoid(-f_t)^relu(alpha) h_{t-1} + sigmoid(i_t) x_t         alpha [1], 1 at the start

  Everything else is as in `QLSTM`. Since sigmoid(-f)^a = exp(-a softplus(f)), this is S6's decay
  with a step size softplus(f). Once alpha <= 0 nothing decays, and alpha's gradient is zero for
  good; exponent="softplus" takes softplus(alpha) instead, with the same value at the start.

  Args:
    exponent: what makes alpha positive: "relu" (the published code) or "softplus".

  The other arguments, and what is raised, are those of `QLSTM`; also `ValueError` for an unknown
  exponent.

  Source: the DSF paper (Sieber et al. 2024), eq. 22, and its published code.
  """

  def __init__(
    self,
    dim: int,
    *,
    expand: int = 2,
    conv_width: int = 4,
    exponent: str = "relu",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    super().__init__(
      dim,
      expand=expand,
      conv_width=conv_width,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.exponent = check_choice("exponent", exponent, EXPONENTS)
    start = 1.0 if exponent == "relu" else jnp.log(jnp.expm1(1.0))
    self.alpha = nnx.Param(jnp.full(1, start, param_dtype))

  def _decay(self, f: jax.Array) -> jax.Array:
    return jnp.exp(-EXPONENTS[self.exponent](wide(self.alpha[...])) * jax.nn.softplus(f))

"""Gated linear recurrences whose new value has the weight that the forget gate leaves: LRN, and
with a lower bound of the gate that rises with depth HGRN and HGRN2."""

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import (
  check_call,
  check_choice,
  check_heads,
  check_layer,
  check_positive,
)
from lnssm_jax.mixers.complex_state import ComplexState, empty_state, from_complex, to_complex
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.initializers import uniform_fan_in
from lnssm_jax.mixers.layers import group_norm, layer_norm, linear, merge_heads, split_heads, wide
from lnssm_jax.ops import DiagonalState, LinearAttentionState
from lnssm_jax.ops.sequence_parallel import diagonal_scan, linear_attention

LOWER_BOUNDS = ("learned", "none")
ACTIVATIONS = {"tanh": jnp.tanh, "silu": jax.nn.silu, "none": lambda x: x}
OUTPUT_GATES = ("sigmoid", "none")

# Stands for a lower bound of 0 where its logarithm is needed.
_TINY = 1e-30


def _bound(lower_bound, dim, layer, num_layers, param_dtype) -> nnx.Param | None:
  """The parameter of a lower bound gamma = 1 - exp(-bound^2), at the start layer / num_layers."""
  check_layer(layer, num_layers)
  if check_choice("lower_bound", lower_bound, LOWER_BOUNDS) == "none":
    return None
  depth = jnp.asarray(layer, jnp.float32) / num_layers
  return nnx.Param(jnp.full(dim, jnp.sqrt(-jnp.log1p(-depth))).astype(param_dtype))


class HGRN2(Divisible):
  r"""Linear attention whose key is what the forget gate lets go: k = 1 - lambda.

      q_t = sigmoid(W_q x_t + b_q),  v_t = silu(W_v x_t + b_v),  m_t = sigmoid(W_f x_t + b_f)
      lambda_t = gamma + (1 - gamma) m_t                                 one per key channel
      S_t = diag(lambda_t) S_{t-1} + (1 - lambda_t) v_t^T,    y_t = S_t^T q_t       for each head
      out_t = W_o LayerNorm(y_t)                                         over all D channels

  The lower bound gamma [D] is layer / num_layers at the start: upper layers remember long. That of
  the first layer is 0 and stays so.

  In the paper all layers share one table P = softmax(Gamma) over layers, and gamma is the sum of P
  over the layers below, which starts at the same values. A layer here has parameters of its own,
  gamma = 1 - exp(-bound^2): learning may move each bound in [0, 1), and nothing keeps them in
  order.

  Args:
    dim: D, the width; a multiple of `num_heads`. The width of a head is K = D / H, for keys and
      values; 128 in the paper.
    num_heads: H.
    layer, num_layers: where the layer stands in its model. `layer` counts from 0 and may be traced.
    lower_bound: "learned", or "none" for gamma = 0 in all layers.
    dtype: of the projections and of q, k, v; decays, norm, the state and sums are float32.
    param_dtype: of the parameters.

  The state is that of the scan. Cutting a sequence anywhere and passing it on gives the same result
  as one call.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive, or `lower_bound` is
      unknown.

  Source: HGRN2 (Qin et al. 2024), section 3; the activations are those of its published code. The
  projections and their biases start uniform within 1 / sqrt(D).
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    lower_bound: str = "learned",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.head_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    init = uniform_fan_in(dim)
    projection = lambda: linear(dim, dim, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    bias = lambda: nnx.Param(init(rngs.params(), (dim,), param_dtype))
    self.q_proj, self.f_proj, self.v_proj = projection(), projection(), projection()
    self.q_bias, self.f_bias, self.v_bias = bias(), bias(), bias()
    self.bound = _bound(lower_bound, dim, layer, num_layers, param_dtype)
    self.norm_gain = nnx.Param(jnp.ones(dim, param_dtype))
    self.norm_bias = nnx.Param(jnp.zeros(dim, param_dtype))
    self.o_proj = projection()

  def init_state(self, batch_size: int) -> LinearAttentionState:
    """The state before the first token: zeros."""
    B, H, K = check_positive("batch_size", batch_size), self.num_heads, self.head_dim
    return LinearAttentionState(jnp.zeros((B, H, K, K), jnp.float32), None)

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: LinearAttentionState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, LinearAttentionState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    q = jax.nn.sigmoid(wide(self.q_proj(x)) + wide(self.q_bias[...]))
    v = jax.nn.silu(wide(self.v_proj(x)) + wide(self.v_bias[...]))
    log_decay, k = self._gates(wide(self.f_proj(x)) + wide(self.f_bias[...]))
    heads = lambda z: split_heads(z, self.num_heads)
    y, state = linear_attention(
      heads(q.astype(self.dtype)),
      heads(k.astype(self.dtype)),
      heads(v.astype(self.dtype)),
      log_decay=heads(log_decay),
      axis_name=self.sequence_axis,
      initial_state=state,
      segment_ids=segment_ids,
    )
    y = layer_norm(merge_heads(y), self.norm_gain[...], self.norm_bias[...])
    return self.o_proj(y.astype(self.dtype)), state

  def _gates(self, f):
    """log(lambda) and 1 - lambda; exact to the dtype, with finite gradients, for every f."""
    if self.bound is None:
      return jax.nn.log_sigmoid(f), jax.nn.sigmoid(-f)
    squared = jnp.square(wide(self.bound[...]))
    k = jnp.exp(-squared) * jax.nn.sigmoid(-f)
    # lambda = (gamma + e^f) / (1 + e^f). Near 1 that quotient would cancel: there, log(1 - k).
    gamma = jnp.maximum(-jnp.expm1(-squared), _TINY)
    quotient = jnp.logaddexp(jnp.log(gamma), f) - jax.nn.softplus(f)
    return jnp.where(k <= 0.5, jnp.log1p(-jnp.minimum(k, 0.5)), quotient), k


class HGRN(Divisible):
  r"""A complex gated linear recurrence in each of D channels; its phase is constant.

      c_t = silu(W_c x_t + b_c)                        2 D numbers: D real and D imaginary parts
      m_t = sigmoid(W_f x_t + b_f),      lambda_t = gamma + (1 - gamma) m_t
      h_t = lambda_t e^(i theta) h_{t-1} + (1 - lambda_t) c_t
      out_t = W_o (LayerNorm([Re h_t, Im h_t]) * silu(W_g x_t + b_g))

  theta [D] is learned and starts at 10000^(-2 i / D). The lower bound gamma [D] is as in `HGRN2`:
  layer / num_layers at the start, a parameter of its own in each layer instead of the paper's table
  for all layers; that of the first layer stays 0.

  Args:
    dim: D, the width.
    layer, num_layers: where the layer stands in its model. `layer` counts from 0 and may be traced.
    lower_bound: "learned", or "none" for gamma = 0 in all layers.
    dtype: of the projections; gates, decays, norm, the state and sums are float32.
    param_dtype: of the parameters.

  The state is h, its real and its imaginary part. Cutting a sequence anywhere and passing it on
  gives the same result as one call.

  Raises:
    ValueError: a size is not positive, or `lower_bound` is unknown.

  Source: HGRN (Qin et al. 2023), section 3.2; norm and output gate in the order of its published
  code (the paper multiplies by the gate first). The projections and their biases start uniform
  within 1 / sqrt(D), W_o within 1 / sqrt(2 D).
  """

  def __init__(
    self,
    dim: int,
    *,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    lower_bound: str = "learned",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    init, options = uniform_fan_in(dim), {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    projection = lambda outputs: linear(dim, outputs, init, **options)
    bias = lambda outputs: nnx.Param(init(rngs.params(), (outputs,), param_dtype))
    self.c_proj, self.f_proj, self.g_proj = (
      projection(2 * dim),
      projection(dim),
      projection(2 * dim),
    )
    self.c_bias, self.f_bias, self.g_bias = bias(2 * dim), bias(dim), bias(2 * dim)
    self.bound = _bound(lower_bound, dim, layer, num_layers, param_dtype)
    theta = 1e4 ** (-2 * jnp.arange(dim, dtype=jnp.float32) / dim)
    self.theta = nnx.Param(theta.astype(param_dtype))
    self.norm_gain = nnx.Param(jnp.ones(2 * dim, param_dtype))
    self.norm_bias = nnx.Param(jnp.zeros(2 * dim, param_dtype))
    self.o_proj = linear(2 * dim, dim, uniform_fan_in(2 * dim), **options)

  def init_state(self, batch_size: int) -> ComplexState:
    """The state before the first token: zeros, [B, D]."""
    return empty_state(check_positive("batch_size", batch_size), self.dim)

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: ComplexState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, ComplexState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    c = jax.nn.silu(wide(self.c_proj(x)) + wide(self.c_bias[...]))
    f = wide(self.f_proj(x)) + wide(self.f_bias[...])
    squared = 0.0 if self.bound is None else jnp.square(wide(self.bound[...]))
    open_share = jnp.exp(-squared)  # 1 - gamma
    forget = jax.nn.sigmoid(f) * open_share - jnp.expm1(-squared)
    theta = wide(self.theta[...])
    h, memory = diagonal_scan(
      jax.lax.complex(forget * jnp.cos(theta), forget * jnp.sin(theta)),
      open_share * jax.nn.sigmoid(-f) * jax.lax.complex(*jnp.split(c, 2, axis=-1)),
      axis_name=self.sequence_axis,
      initial_state=None if state is None else DiagonalState(to_complex(state)),
      segment_ids=segment_ids,
    )
    y = group_norm(jnp.concatenate([h.real, h.imag], axis=-1))
    y = y * wide(self.norm_gain[...]) + wide(self.norm_bias[...])
    y = y * jax.nn.silu(wide(self.g_proj(x)) + wide(self.g_bias[...]))
    return self.o_proj(y.astype(self.dtype)), from_complex(memory.h)


class LRN(Divisible):
  r"""The gated impulse linear recurrence (GILR): each channel is a moving average of its inputs.

      f_t = sigmoid(W_f x_t + b_f),   i_t = act(W_i x_t + b_i),   g_t = sigmoid(W_g x_t + b_g)
      h_t = f_t h_{t-1} + (1 - f_t) i_t
      out_t = W_o (g_t h_t)

  Args:
    dim: D, the width.
    activation: act: "tanh", "silu" or "none".
    output_gate: "sigmoid", or "none" for g = 1, the paper's own layer.
    dtype: of the projections; gates, decays, the state and sums are float32.
    param_dtype: of the parameters.

  The state is h. Cutting a sequence anywhere and passing it on gives the same result as one call.

  Raises:
    ValueError: a size is not positive, or a choice is unknown.

  Source: Martin and Cundy 2018, section 2.2; the output gate is that of the LRN in the LCSM paper's
  table of models. The papers' layers end with g h; W_o makes it one for a residual stream. The
  projections and their biases start uniform within 1 / sqrt(D).
  """

  def __init__(
    self,
    dim: int,
    *,
    activation: str = "tanh",
    output_gate: str = "sigmoid",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.activation = check_choice("activation", activation, ACTIVATIONS)
    gated = check_choice("output_gate", output_gate, OUTPUT_GATES) == "sigmoid"
    init = uniform_fan_in(dim)
    projection = lambda: linear(dim, dim, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    bias = lambda: nnx.Param(init(rngs.params(), (dim,), param_dtype))
    self.f_proj, self.i_proj, self.o_proj = projection(), projection(), projection()
    self.f_bias, self.i_bias = bias(), bias()
    self.g_proj, self.g_bias = (projection(), bias()) if gated else (None, None)

  def init_state(self, batch_size: int) -> DiagonalState:
    """The state before the first token: zeros, [B, D]."""
    return DiagonalState(jnp.zeros((check_positive("batch_size", batch_size), self.dim)))

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: DiagonalState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, DiagonalState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    f = wide(self.f_proj(x)) + wide(self.f_bias[...])
    value = ACTIVATIONS[self.activation](wide(self.i_proj(x)) + wide(self.i_bias[...]))
    y, state = diagonal_scan(
      jax.nn.sigmoid(f),
      jax.nn.sigmoid(-f) * value,
      axis_name=self.sequence_axis,
      initial_state=state,
      segment_ids=segment_ids,
    )
    if self.g_proj is not None and self.g_bias is not None:
      y = y * jax.nn.sigmoid(wide(self.g_proj(x)) + wide(self.g_bias[...]))
    return self.o_proj(y.astype(self.dtype)), state

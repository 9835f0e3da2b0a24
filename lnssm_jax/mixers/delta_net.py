"""DeltaNet and Gated DeltaNet: memories that correct what they hold for a key."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_call, check_heads, check_positive
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.initializers import step_size_bias, xavier_uniform
from lnssm_jax.mixers.layers import (
  linear,
  merge_heads,
  silu_gate,
  smooth_rms_norm,
  split_heads,
  unit_norm,
  wide,
)
from lnssm_jax.mixers.short_convolution import ShortConvolution
from lnssm_jax.ops import DeltaRuleState
from lnssm_jax.ops.sequence_parallel import delta_rule

# A decay rate of 0, which the distribution of the published code holds, has no logarithm.
_LOWEST_RATE = 1e-4


class DeltaNetState(NamedTuple):
  """What a layer remembers of a sequence. float32."""

  q_conv: jax.Array  # [B, W - 1, H K], the last inputs of the convolutions
  k_conv: jax.Array  # [B, W - 1, H K]
  v_conv: jax.Array  # [B, W - 1, H V]
  memory: DeltaRuleState  # kv [B, H, K, V]


class _DeltaBlock(Divisible):
  """What both share: projections, convolutions, unit queries and keys, and the rate beta."""

  def _build(self, dim, num_heads, key_dim, value_dim, conv_width, linear_options):
    self.dim, self.num_heads = dim, num_heads
    self.dtype = jnp.dtype(linear_options["dtype"])
    self.key_dim, self.value_dim = key_dim, value_dim
    keys, values = num_heads * key_dim, num_heads * value_dim
    init = xavier_uniform(2**-2.5)
    projection = lambda inputs, outputs: linear(inputs, outputs, init, **linear_options)
    self.q_proj, self.k_proj = projection(dim, keys), projection(dim, keys)
    self.v_proj, self.b_proj = projection(dim, values), projection(dim, num_heads)

    def convolution(channels):
      options = {"use_bias": False, "activation": "silu"} | linear_options
      return ShortConvolution(channels, conv_width, **options)

    self.q_conv, self.k_conv, self.v_conv = (convolution(n) for n in (keys, keys, values))
    self.norm_gain = nnx.Param(jnp.ones(value_dim, linear_options["param_dtype"]))
    self.o_proj = projection(values, dim)

  def init_state(self, batch_size: int) -> DeltaNetState:
    """The state before the first token: zeros."""
    B = check_positive("batch_size", batch_size)
    kv = jnp.zeros((B, self.num_heads, self.key_dim, self.value_dim), jnp.float32)
    q_conv, k_conv, v_conv = (c.init_state(B) for c in (self.q_conv, self.k_conv, self.v_conv))
    return DeltaNetState(q_conv, k_conv, v_conv, DeltaRuleState(kv))

  def _read(self, x, state, segment_ids, log_decay):
    """(The normalised memory's answer [B, T, H V] in float32, the state after the last token.)"""
    q_conv, k_conv, v_conv, memory = state if state is not None else (None,) * 4

    def stream(z, conv, conv_state):
      z, conv_state = conv(z, conv_state, segment_ids)
      return split_heads(z, self.num_heads), conv_state

    q, q_conv = stream(self.q_proj(x), self.q_conv, q_conv)
    k, k_conv = stream(self.k_proj(x), self.k_conv, k_conv)
    v, v_conv = stream(self.v_proj(x), self.v_conv, v_conv)
    y, memory = delta_rule(
      unit_norm(q).astype(self.dtype),
      unit_norm(k).astype(self.dtype),
      v.astype(self.dtype),
      jax.nn.sigmoid(wide(self.b_proj(x))),
      log_decay=log_decay,
      scale=self.key_dim**-0.5,
      axis_name=self.sequence_axis,
      initial_state=memory,
      segment_ids=segment_ids,
    )
    y = merge_heads(smooth_rms_norm(y, self.norm_gain[...]))
    return y, DeltaNetState(q_conv, k_conv, v_conv, memory)


class DeltaNet(_DeltaBlock):
  r"""The delta rule with unit keys: each step moves the value of its key towards a new one.

      q_t = unit(silu(conv(W_q x))_t),  k_t = unit(silu(conv(W_k x))_t),  v_t = silu(conv(W_v x))_t
      S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    beta_t = sigmoid(W_b x_t)
      y_t = K^(-1/2) S_t^T q_t,      out_t = W_o RMSNorm(y_t)                       for each head

  unit(z) = z / sqrt(sum(z^2) + 1e-6) for each head; K = V = D / H. The norm goes over the V
  channels of each head, with one scale [V] for all heads.

  Args:
    dim: D, the width of input and output; a multiple of `num_heads`.
    num_heads: H.
    conv_width: the steps that a convolution sees.
    dtype: of the projections and of q, k, v; beta, norms, the state and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Source: DeltaNet (Yang et al. 2024), section 3.3; all kernels start Xavier-uniform with gain
  2^(-5/2), as those of GLA.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    conv_width: int = 4,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    width = check_heads(dim, num_heads)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self._build(dim, num_heads, width, width, conv_width, options)

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: DeltaNetState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, DeltaNetState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    y, state = self._read(x, state, segment_ids, None)
    return self.o_proj(y.astype(self.dtype)), state


class GatedDeltaNet(_DeltaBlock):
  r"""The delta rule of `DeltaNet` with a decay per step and head, wider values and an output gate.

      a_t = exp(-exp(log_rate) softplus(W_a x_t + dt_bias))                     one number per head
      S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
      y_t = K^(-1/2) S_t^T q_t,      out_t = W_o (silu(W_g x_t) * RMSNorm(y_t))

  with q, k, v, beta and the norm of `DeltaNet`. Initially the rate is uniform between 0 and 16, and
  softplus(dt_bias) log-uniform between 0.001 and 0.1.

  Args:
    dim: D, the width of input and output.
    num_heads: H.
    head_dim: K; None means D / H.
    expand_v: V / K.
    conv_width: the steps that a convolution sees.
    dtype: of the projections and of q, k, v; decays, beta, norms, state and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Raises:
    ValueError: a size is not positive, or, without `head_dim`, `dim` is not a multiple of
      `num_heads`.

  Source: Gated DeltaNet (Yang et al. 2025), section 3.4; initialisation of the decay as in Mamba-2;
  all kernels start Xavier-uniform with gain 2^(-5/2), as those of GLA.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    head_dim: int | None = None,
    expand_v: int = 2,
    conv_width: int = 4,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_positive("dim", dim)
    check_positive("num_heads", num_heads)
    key_dim = check_heads(dim, num_heads) if head_dim is None else head_dim
    value_dim = check_positive("head_dim", key_dim) * check_positive("expand_v", expand_v)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self._build(dim, num_heads, key_dim, value_dim, conv_width, options)
    init = xavier_uniform(2**-2.5)
    self.a_proj = linear(dim, num_heads, init, **options)
    self.g_proj = linear(dim, num_heads * value_dim, init, **options)
    rate = jax.random.uniform(rngs.params(), (num_heads,), jnp.float32, 0.0, 16.0)
    self.log_rate = nnx.Param(jnp.log(jnp.maximum(rate, _LOWEST_RATE)).astype(param_dtype))
    self.dt_bias = nnx.Param(step_size_bias(rngs.params(), num_heads).astype(param_dtype))

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: DeltaNetState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, DeltaNetState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token), as `DeltaNet` does.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    step = jax.nn.softplus(wide(self.a_proj(x)) + wide(self.dt_bias[...]))
    y, state = self._read(x, state, segment_ids, -jnp.exp(wide(self.log_rate[...])) * step)
    return self.o_proj(silu_gate(y, self.g_proj(x)).astype(self.dtype)), state

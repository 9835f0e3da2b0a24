"""DeltaNet and Gated DeltaNet: associative memories that correct the value stored for a key."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common.checks import check_heads, check_positive
from lnssm_jax.mixers.common.initializers import step_size_bias, xavier_uniform
from lnssm_jax.mixers.common.norms import RMSNorm, unit_norm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.mixers.common.short_convolution import ShortConvolution
from lnssm_jax.ops import ConvState, DeltaRuleState, delta_rule
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state

# A decay rate of 0, which the distribution of the published code contains, has no logarithm.
_LOWEST_RATE = 1e-4


@register_state
class DeltaNetState(NamedTuple):
  """Recurrent state of `DeltaNet` and `GatedDeltaNet`, float32."""

  q_conv: ConvState  # inputs [B, W - 1, H K]
  k_conv: ConvState  # inputs [B, W - 1, H K]
  v_conv: ConvState  # inputs [B, W - 1, H V]
  recurrent: DeltaRuleState  # kv [B, H, K, V]


class _DeltaBlock(Mixer[DeltaNetState]):
  """Projections, convolutions, unit queries and keys, the rate beta and the norm of the output."""

  set_by_model = ("num_heads",)

  def _build(self, dim, num_heads, key_dim, value_dim, conv_size, norm_eps, options):
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(options["dtype"])
    self.key_dim, self.value_dim = key_dim, value_dim
    keys, values = num_heads * key_dim, num_heads * value_dim
    linear = functools.partial(Linear, kernel_init=xavier_uniform(2**-2.5), **options)
    self.q_proj, self.k_proj = linear(dim, keys), linear(dim, keys)
    self.v_proj, self.b_proj = linear(dim, values), linear(dim, num_heads)
    conv = functools.partial(ShortConvolution, use_bias=False, activation="silu", **options)
    self.q_conv, self.k_conv, self.v_conv = (conv(n, conv_size) for n in (keys, keys, values))
    self.norm = RMSNorm(value_dim, eps=norm_eps, param_dtype=options["param_dtype"])
    self.o_proj = linear(values, dim)

  def _init_state(self, B):
    kv = jnp.zeros((B, self.num_heads, self.key_dim, self.value_dim), jnp.float32)
    q_conv, k_conv, v_conv = (c.init_state(B) for c in (self.q_conv, self.k_conv, self.v_conv))
    return DeltaNetState(q_conv, k_conv, v_conv, DeltaRuleState(kv))

  def _mix_gated(self, x, state, segment_ids, *, log_decay, gate):
    """(W_o (RMSNorm(y) * silu(gate)), the state after the last token)."""
    q_conv, k_conv, v_conv, recurrent = state if state is not None else (None,) * 4

    def stream(z, conv, conv_state):
      z, conv_state = conv(z, conv_state, segment_ids)
      return split_heads(z, self.num_heads), conv_state

    q, q_conv = stream(self.q_proj(x), self.q_conv, q_conv)
    k, k_conv = stream(self.k_proj(x), self.k_conv, k_conv)
    v, v_conv = stream(self.v_proj(x), self.v_conv, v_conv)
    y, recurrent = delta_rule(
      unit_norm(q, dtype=self.dtype),
      unit_norm(k, dtype=self.dtype),
      v.astype(self.dtype),
      jax.nn.sigmoid(wide(self.b_proj(x))),
      log_decay=log_decay,
      scale=self.key_dim**-0.5,
      axis_name=self.sequence_axis,
      initial_state=recurrent,
      segment_ids=segment_ids,
    )
    gate = None if gate is None else split_heads(gate, self.num_heads)
    out = self.o_proj(merge_heads(self.norm(y, gate=gate, dtype=self.dtype)))
    return out, DeltaNetState(q_conv, k_conv, v_conv, recurrent)


class DeltaNet(_DeltaBlock):
  r"""The delta rule with unit keys: each token moves the value stored for its key towards its own.

      q_t = unit(silu(conv(W_q x))_t),  k_t = unit(silu(conv(W_k x))_t),  v_t = silu(conv(W_v x))_t
      S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    beta_t = sigmoid(W_b x_t)
      y_t = K^(-1/2) S_t^T q_t,      out_t = W_o RMSNorm(y_t)                      per head

  unit(z) = z / sqrt(sum(z^2) + 1e-6) per head; K = V = D / H. The norm is over the V channels of
  each head, with one scale [V] for all heads.

  Args:
    dim: D, the width of input and output; a multiple of `num_heads`.
    num_heads: H.
    conv_size: W, the tokens that a convolution sees.
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; beta, norms, state and sums are float32.
    param_dtype: of the parameters.

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
    conv_size: int = 4,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    width = check_heads(dim, num_heads)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self._build(dim, num_heads, width, width, conv_size, norm_eps, options)

  def _mix(self, x, state, segment_ids):
    return self._mix_gated(x, state, segment_ids, log_decay=None, gate=None)


class GatedDeltaNet(_DeltaBlock):
  r"""The delta rule of `DeltaNet` with a decay per token and head, wider values and an output gate.

      a_t = exp(-exp(log_rate) softplus(W_a x_t + b_a))                            per head
      S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
      y_t = K^(-1/2) S_t^T q_t,      out_t = W_o (silu(W_g x_t) * RMSNorm(y_t))

  with q, k, v, beta and the norm of `DeltaNet`. Initially the rate exp(log_rate) is uniform between
  0 and 16, and softplus(b_a) log-uniform between 0.001 and 0.1.

  Args:
    dim: D, the width of input and output.
    num_heads: H.
    head_dim: K; None means D / H.
    expand_v: V / K.
    conv_size: W, the tokens that a convolution sees.
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; decays, beta, norms, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, or, without `head_dim`, `dim` is not a multiple of
      `num_heads`.

  Source: Gated DeltaNet (Yang et al. 2025), section 3.4; initialization of the decay as in Mamba-2;
  all kernels start Xavier-uniform with gain 2^(-5/2), as those of GLA.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    head_dim: int | None = None,
    expand_v: int = 2,
    conv_size: int = 4,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_positive("dim", dim)
    check_positive("num_heads", num_heads)
    key_dim = check_heads(dim, num_heads) if head_dim is None else head_dim
    value_dim = check_positive("head_dim", key_dim) * check_positive("expand_v", expand_v)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self._build(dim, num_heads, key_dim, value_dim, conv_size, norm_eps, options)
    linear = functools.partial(Linear, kernel_init=xavier_uniform(2**-2.5), **options)
    self.a_proj = linear(dim, num_heads)
    self.g_proj = linear(dim, num_heads * value_dim)
    rate = jax.random.uniform(rngs.params(), (num_heads,), jnp.float32, 0.0, 16.0)
    self.log_rate = nnx.Param(jnp.log(jnp.maximum(rate, _LOWEST_RATE)).astype(param_dtype))
    self.a_proj.draw_bias(step_size_bias, rngs)

  def _mix(self, x, state, segment_ids):
    rate = jnp.exp(wide(self.log_rate[...]))
    log_decay = -rate * jax.nn.softplus(self.a_proj(x))
    return self._mix_gated(x, state, segment_ids, log_decay=log_decay, gate=self.g_proj(x))

"""MetaLA: linear attention whose keys are 1 minus the decay."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import SelectingMixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.activations import log_gate, silu_gate
from lnssm_jax.mixers.common.checks import check_head_widths, check_norm_eps, check_normalizer
from lnssm_jax.mixers.common.initializers import xavier_uniform
from lnssm_jax.mixers.common.norms import layer_norm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.mixers.common.routing import RowSparsity
from lnssm_jax.mixers.common.short_convolution import ShortConvolution
from lnssm_jax.ops import ConvState, LinearAttentionState, linear_attention
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state


@register_state
class MetaLAState(NamedTuple):
  """Recurrent state of `MetaLA`, float32."""

  conv: ConvState  # inputs [B, W - 1, D]
  recurrent: LinearAttentionState  # kv [B, H, K, V]


class MetaLA(SelectingMixer[MetaLAState]):
  r"""Gated linear attention without a key projection, plus a term of the current token alone.

      u = silu(conv(x)),      q_t = W_q u_t,  v_t = W_v u_t
      a_t = sigmoid(W_a u_t)^(1 / tau),  k_t = 1 - a_t                             per key channel
      S_t = diag(a_t) S_{t-1} + k_t v_t^T                                          per head
      y_t = K^(-1/2) S_t^T q_t + sigmoid((q_t . (w * k_t)) v_t)
      out_t = W_o (silu(W_g u_t + b) * LayerNorm(y_t))

  The norm is over the V channels of each head, without scale and bias. w starts at 0, where the
  second summand is 1/2. All projections read u.

  Args:
    dim: D, the width of input and output.
    num_heads: H.
    expand_k, expand_v: H K / D and H V / D.
    conv_size: W, the tokens that the convolution sees; it has no bias. None leaves convolution and
      silu out, u = x, as the models of the SSE paper do.
    gate_logit_normalizer: tau; larger values move the decays towards 1.
    selected_rows: k, the rows of the state that a token decays and writes, those of its largest
      1 - a_t; None for all. The others keep decay 1. `RowSparsity` has the source.
    balance: coefficient of the balance loss of `selected_rows`, which `with_aux` returns.
    mass: in that loss, the mean weight of the "selected" rows, or of all ("full").
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, or keys or values do not divide evenly among the heads.

  Source: MetaLA (Chou et al. 2024), section 5, and its published code; kernels start Xavier-uniform
  with gain 2^(-5/2), as those of GLA.
  """

  name = "metala"
  starts_as_model = True
  set_by_model = ("num_heads",)
  recurrence_flops = flops.linear_attention

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    expand_k: float = 0.5,
    expand_v: float = 1.0,
    conv_size: int | None = 4,
    gate_logit_normalizer: float = 16.0,
    selected_rows: int | None = None,
    balance: float = 0.01,
    mass: str = "selected",
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.key_dim, self.value_dim = check_head_widths(dim, num_heads, expand_k, expand_v)
    self.norm_eps = check_norm_eps(norm_eps)
    self.rows = RowSparsity.checked(selected_rows, "the key width", self.key_dim, balance, mass)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    self.gate_logit_normalizer = check_normalizer(gate_logit_normalizer)
    keys, values = num_heads * self.key_dim, num_heads * self.value_dim
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    linear = functools.partial(Linear, kernel_init=xavier_uniform(2**-2.5), **options)
    activation = None if conv_size is None else "silu"
    self.conv = ShortConvolution(dim, conv_size, use_bias=False, activation=activation, **options)
    self.q_proj, self.a_proj = linear(dim, keys), linear(dim, keys)
    self.v_proj, self.g_proj = linear(dim, values), linear(dim, values, bias_init="zeros")
    self.own_gain = nnx.Param(jnp.zeros(keys, param_dtype))
    self.o_proj = linear(values, dim)

  def _init_state(self, B):
    kv = jnp.zeros((B, self.num_heads, self.key_dim, self.value_dim), jnp.float32)
    return MetaLAState(self.conv.init_state(B), LinearAttentionState(kv, None))

  def _run(self, x, state, segment_ids):
    """(out, state, (weights, whether selected) of the rows [B, T, heads, rows], or None)."""
    conv, recurrent = state if state is not None else (None, None)
    u, conv = self.conv(x, conv, segment_ids)
    heads = lambda z: split_heads(z, self.num_heads)
    q, v = heads(self.q_proj(u)), heads(self.v_proj(u))
    log_decay = heads(log_gate(self.a_proj(u), self.gate_logit_normalizer))
    k, selection = -jnp.expm1(log_decay), None
    if self.rows is not None:
      chosen = self.rows.select(k)
      selection = k, chosen
      k, log_decay = jnp.where(chosen, k, 0.0), jnp.where(chosen, log_decay, 0.0)
    y, recurrent = linear_attention(
      q,
      k.astype(self.dtype),
      v,
      log_decay=log_decay,
      scale=self.key_dim**-0.5,
      **self._place(recurrent, segment_ids),
    )
    gain = wide(self.own_gain[...]).reshape(self.num_heads, self.key_dim)
    own = jnp.sum(wide(q) * gain * k, axis=-1, keepdims=True)
    # sigmoid(z) - 1/2: the norm subtracts any constant, which would only cost digits here.
    y = layer_norm(wide(y) + 0.5 * jnp.tanh(0.5 * own * wide(v)), eps=self.norm_eps)
    out = self.o_proj(silu_gate(merge_heads(y), self.g_proj(u)).astype(self.dtype))
    return out, MetaLAState(conv, recurrent), selection

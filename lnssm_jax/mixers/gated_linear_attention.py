"""Linear attention with decay: gated linear attention (GLA) and retention (RetNet)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common.activations import log_gate
from lnssm_jax.mixers.common.checks import (
  check_head_widths,
  check_heads,
  check_normalizer,
  check_positive,
)
from lnssm_jax.mixers.common.initializers import xavier_uniform
from lnssm_jax.mixers.common.norms import RMSNorm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.ops import LinearAttentionState, linear_attention, rotary_embedding
from lnssm_jax.ops.core.halo import step_positions
from lnssm_jax.ops.core.states import register_state


class GLA(Mixer[LinearAttentionState]):
  r"""Gated linear attention: each key channel decays by a data-dependent factor.

      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t,      a_t = sigmoid(W_2 W_1 x_t + b)^(1 / tau)
      S_t = diag(a_t) S_{t-1} + k_t v_t^T,      y_t = K^(-1/2) S_t^T q_t           per head
      out_t = W_o (silu(W_g x_t) * RMSNorm(y_t))

  The norm is over the V channels of each head, with one scale [V] for all heads. There are no
  feature maps and no normalizer.

  Args:
    dim: D, the width of input and output.
    num_heads: H.
    expand_k, expand_v: H K / D and H V / D. Longhorn's experiments use 1 and 2.
    gate_rank: the width of W_1 x.
    gate_logit_normalizer: tau; larger values move the decays towards 1.
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, or keys or values do not divide evenly among the heads.

  Source: GLA (Yang et al. 2024), section 4.4; all kernels start Xavier-uniform with gain 2^(-5/2),
  and b at zero, as in its published code.
  """

  set_by_model = ("num_heads",)

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    expand_k: float = 0.5,
    expand_v: float = 1.0,
    gate_rank: int = 16,
    gate_logit_normalizer: float = 16.0,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.key_dim, self.value_dim = check_head_widths(dim, num_heads, expand_k, expand_v)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    check_positive("gate_rank", gate_rank)
    self.gate_logit_normalizer = check_normalizer(gate_logit_normalizer)
    keys, values = num_heads * self.key_dim, num_heads * self.value_dim
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    linear = functools.partial(Linear, kernel_init=xavier_uniform(2**-2.5), **options)
    self.q_proj, self.k_proj = linear(dim, keys), linear(dim, keys)
    self.v_proj, self.g_proj = linear(dim, values), linear(dim, values)
    self.decay_down_proj = linear(dim, gate_rank)
    self.decay_up_proj = linear(gate_rank, keys, bias_init="zeros")
    self.norm = RMSNorm(self.value_dim, eps=norm_eps, param_dtype=param_dtype)
    self.o_proj = linear(values, dim)

  def _init_state(self, B):
    shape = (B, self.num_heads, self.key_dim, self.value_dim)
    return LinearAttentionState(jnp.zeros(shape, jnp.float32), None)

  def _mix(self, x, state, segment_ids):
    heads = lambda z: split_heads(z, self.num_heads)
    decay = self.decay_up_proj(self.decay_down_proj(x))
    y, state = linear_attention(
      heads(self.q_proj(x)),
      heads(self.k_proj(x)),
      heads(self.v_proj(x)),
      log_decay=heads(log_gate(decay, self.gate_logit_normalizer)),
      scale=self.key_dim**-0.5,
      axis_name=self.sequence_axis,
      initial_state=state,
      segment_ids=segment_ids,
    )
    y = self.norm(y, gate=heads(self.g_proj(x)), dtype=self.dtype)
    return self.o_proj(merge_heads(y)), state


@register_state
class RetNetState(NamedTuple):
  """Recurrent state of `RetNet`."""

  recurrent: LinearAttentionState  # kv [B, H, K, V] float32
  position: jax.Array  # [B] int32, the number of tokens of the segment so far


class RetNet(Mixer[RetNetState]):
  r"""Multi-scale retention: one constant decay per head, and positions as rotations.

      q_t = R_t W_q x_t,  k_t = R_t W_k x_t,  v_t = W_v x_t       R_t rotates pairs of channels by t
      S_t = gamma_h S_{t-1} + k_t v_t^T,      y_t = K^(-1/2) S_t^T q_t             per head h
      out_t = W_o (silu(W_g x_t) * RMSNorm(y_t))                          gamma_h = 1 - 2^(-5 - h)

  The norm is over the V channels of each head, with one scale [V] for all heads. K = D / H must be
  even.

  Args:
    dim: D, the width of input and output.
    num_heads: H; it sets the decays, from 31/32 for the first head on.
    expand_v: H V / D.
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, K is odd, or values do not divide evenly among the heads.

  Source: RetNet (Sun et al. 2023), eqs. 5-8; kernels start Xavier-uniform as in its published code,
  with gain 2^(-5/2), W_o with 1. That code has no scale in its norm.
  """

  set_by_model = ("num_heads",)

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    expand_v: float = 2.0,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_heads(dim, num_heads)
    self.key_dim, self.value_dim = check_head_widths(dim, num_heads, 1, expand_v)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    if self.key_dim % 2:
      raise ValueError(
        f"dim={dim} and num_heads={num_heads} give keys of odd width {self.key_dim}, but pairs of "
        "channels rotate; change one of the two."
      )
    values = num_heads * self.value_dim
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    linear = functools.partial(Linear, kernel_init=xavier_uniform(2**-2.5), **options)
    self.q_proj, self.k_proj = linear(dim, dim), linear(dim, dim)
    self.v_proj, self.g_proj = linear(dim, values), linear(dim, values)
    self.norm = RMSNorm(self.value_dim, eps=norm_eps, param_dtype=param_dtype)
    self.o_proj = linear(values, dim, kernel_init=xavier_uniform(1.0))

  def _init_state(self, B):
    kv = jnp.zeros((B, self.num_heads, self.key_dim, self.value_dim), jnp.float32)
    return RetNetState(LinearAttentionState(kv, None), jnp.zeros(B, jnp.int32))

  def _mix(self, x, state, segment_ids):
    B, T, _ = x.shape
    recurrent, position = state if state is not None else (None, jnp.zeros(B, jnp.int32))
    axis = self.sequence_axis
    positions, position = step_positions(B, T, segment_ids, position, axis_name=axis)
    heads = lambda z: split_heads(z, self.num_heads)
    # log1p: in float32, 1 - 2^(-5 - h) itself would be 1 from h = 20 on.
    log_decay = jnp.log1p(-(2.0 ** (-5.0 - jnp.arange(self.num_heads))))
    y, recurrent = linear_attention(
      rotary_embedding(heads(self.q_proj(x)), positions),
      rotary_embedding(heads(self.k_proj(x)), positions),
      heads(self.v_proj(x)),
      log_decay=log_decay,
      scale=self.key_dim**-0.5,
      axis_name=axis,
      initial_state=recurrent,
      segment_ids=segment_ids,
    )
    y = self.norm(y, gate=heads(self.g_proj(x)), dtype=self.dtype)
    return self.o_proj(merge_heads(y)), RetNetState(recurrent, position)

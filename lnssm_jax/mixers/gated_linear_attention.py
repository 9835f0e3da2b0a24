"""Linear attention with decay: gated linear attention (GLA) and retention (RetNet)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_call, check_heads, check_positive, check_width
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.initializers import xavier_uniform
from lnssm_jax.mixers.layers import (
  linear,
  merge_heads,
  silu_gate,
  smooth_rms_norm,
  split_heads,
  wide,
)
from lnssm_jax.ops import LinearAttentionState, rotary_embedding
from lnssm_jax.ops.sequence_parallel import linear_attention, step_positions


class GLA(Divisible):
  r"""Gated linear attention: each key channel decays by a factor that depends on the input.

      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t,      a_t = sigmoid(W_2 W_1 x_t + b)^(1 / tau)
      S_t = diag(a_t) S_{t-1} + k_t v_t^T,      y_t = K^(-1/2) S_t^T q_t            for each head
      out_t = W_o (silu(W_g x_t) * RMSNorm(y_t))

  The norm goes over the V channels of each head, with one scale [V] for all heads. Without feature
  maps and without a normaliser.

  Args:
    dim: D, the width of input and output.
    num_heads: H.
    expand_k, expand_v: H K / D and H V / D. Longhorn's experiments use 1 and 2.
    gate_rank: the width of W_1 x.
    gate_temperature: tau; the larger, the nearer the decays are to 1.
    dtype: of the projections and of q, k, v; decays, norm, the state and sums are float32.
    param_dtype: of the parameters.

  The state is that of the scan. Cutting a sequence anywhere and passing it on gives the same result
  as one call.

  Raises:
    ValueError: a size is not positive, or keys or values do not divide evenly among the heads.

  Source: GLA (Yang et al. 2024), section 4.4; all kernels start Xavier-uniform with gain 2^(-5/2),
  and b at zero, as in its published code.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    expand_k: float = 0.5,
    expand_v: float = 1.0,
    gate_rank: int = 16,
    gate_temperature: float = 16.0,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.num_heads = check_positive("dim", dim), check_positive("num_heads", num_heads)
    self.dtype = jnp.dtype(dtype)
    keys = check_width("expand_k", dim, expand_k, num_heads)
    values = check_width("expand_v", dim, expand_v, num_heads)
    self.key_dim, self.value_dim = keys // num_heads, values // num_heads
    check_positive("gate_rank", gate_rank)
    if not gate_temperature > 0:
      raise ValueError(f"gate_temperature={gate_temperature} must be positive.")
    self.gate_temperature = gate_temperature

    def projection(inputs, outputs):
      init = xavier_uniform(2**-2.5)
      return linear(inputs, outputs, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    self.q_proj, self.k_proj = projection(dim, keys), projection(dim, keys)
    self.v_proj, self.g_proj = projection(dim, values), projection(dim, values)
    self.decay_down_proj = projection(dim, gate_rank)
    self.decay_up_proj = projection(gate_rank, keys)
    self.decay_bias = nnx.Param(jnp.zeros(keys, param_dtype))
    self.norm_gain = nnx.Param(jnp.ones(self.value_dim, param_dtype))
    self.o_proj = projection(values, dim)

  def init_state(self, batch_size: int) -> LinearAttentionState:
    """The state before the first token: zeros."""
    B = check_positive("batch_size", batch_size)
    shape = (B, self.num_heads, self.key_dim, self.value_dim)
    return LinearAttentionState(jnp.zeros(shape, jnp.float32), None)

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
    heads = lambda z: split_heads(z, self.num_heads)
    decay = wide(self.decay_up_proj(self.decay_down_proj(x))) + wide(self.decay_bias[...])
    y, state = linear_attention(
      heads(self.q_proj(x)),
      heads(self.k_proj(x)),
      heads(self.v_proj(x)),
      log_decay=heads(jax.nn.log_sigmoid(decay) / self.gate_temperature),
      scale=self.key_dim**-0.5,
      axis_name=self.sequence_axis,
      initial_state=state,
      segment_ids=segment_ids,
    )
    y = merge_heads(smooth_rms_norm(y, self.norm_gain[...]))
    return self.o_proj(silu_gate(y, self.g_proj(x)).astype(self.dtype)), state


class RetNetState(NamedTuple):
  """What a layer remembers of a sequence."""

  memory: LinearAttentionState  # kv [B, H, K, V] float32
  position: jax.Array  # [B] int32, the number of tokens of the segment so far


class RetNet(Divisible):
  r"""Multi-scale retention: one constant decay per head, and positions as rotations.

      q_t = R_t W_q x_t,  k_t = R_t W_k x_t,  v_t = W_v x_t       R_t rotates pairs of channels by t
      S_t = gamma_h S_{t-1} + k_t v_t^T,      y_t = K^(-1/2) S_t^T q_t              for each head h
      out_t = W_o (silu(W_g x_t) * RMSNorm(y_t))                          gamma_h = 1 - 2^(-5 - h)

  The norm goes over the V channels of each head, with one scale [V] for all heads. K = D / H must
  be even.

  Args:
    dim: D, the width of input and output.
    num_heads: H; it sets the decays, from 31/32 for the first head on.
    expand_v: H V / D.
    dtype: of the projections and of q, k, v; decays, norm, the state and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Raises:
    ValueError: a size is not positive, K is odd, or values do not divide evenly among the heads.

  Source: RetNet (Sun et al. 2023), eqs. 5-8; kernels start Xavier-uniform as in its published code,
  with gain 2^(-5/2), W_o with 1. That code has no scale in its norm.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    expand_v: float = 2.0,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    self.key_dim = check_heads(dim, num_heads)
    if self.key_dim % 2:
      raise ValueError(
        f"dim={dim} and num_heads={num_heads} give keys of odd width {self.key_dim}, but pairs of "
        "channels rotate; change one of the two."
      )
    values = check_width("expand_v", dim, expand_v, num_heads)
    self.value_dim = values // num_heads

    def projection(inputs, outputs, gain=2**-2.5):
      init = xavier_uniform(gain)
      return linear(inputs, outputs, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    self.q_proj, self.k_proj = projection(dim, dim), projection(dim, dim)
    self.v_proj, self.g_proj = projection(dim, values), projection(dim, values)
    self.norm_gain = nnx.Param(jnp.ones(self.value_dim, param_dtype))
    self.o_proj = projection(values, dim, 1.0)

  def init_state(self, batch_size: int) -> RetNetState:
    """The state before the first token: zeros."""
    B = check_positive("batch_size", batch_size)
    kv = jnp.zeros((B, self.num_heads, self.key_dim, self.value_dim), jnp.float32)
    return RetNetState(LinearAttentionState(kv, None), jnp.zeros(B, jnp.int32))

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: RetNetState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, RetNetState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    B, T, _ = x.shape
    memory, position = state if state is not None else (None, jnp.zeros(B, jnp.int32))
    axis = self.sequence_axis
    positions, position = step_positions(B, T, segment_ids, position, axis_name=axis)
    heads = lambda z: split_heads(z, self.num_heads)
    # log1p: in float32, 1 - 2^(-5 - h) itself would be 1 from h = 20 on.
    log_decay = jnp.log1p(-(2.0 ** (-5.0 - jnp.arange(self.num_heads))))
    y, memory = linear_attention(
      rotary_embedding(heads(self.q_proj(x)), positions),
      rotary_embedding(heads(self.k_proj(x)), positions),
      heads(self.v_proj(x)),
      log_decay=log_decay,
      scale=self.key_dim**-0.5,
      axis_name=self.sequence_axis,
      initial_state=memory,
      segment_ids=segment_ids,
    )
    y = merge_heads(smooth_rms_norm(y, self.norm_gain[...]))
    out = self.o_proj(silu_gate(y, self.g_proj(x)).astype(self.dtype))
    return out, RetNetState(memory, position)

"""MetaLA: linear attention whose keys are what the decay lets go."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_call, check_positive, check_width
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.initializers import xavier_uniform
from lnssm_jax.mixers.layers import (
  group_norm,
  linear,
  merge_heads,
  silu_gate,
  split_heads,
  wide,
)
from lnssm_jax.mixers.short_convolution import ShortConvolution
from lnssm_jax.ops import LinearAttentionState
from lnssm_jax.ops.sequence_parallel import linear_attention


class MetaLAState(NamedTuple):
  """What a layer remembers of a sequence. float32."""

  conv: jax.Array  # [B, W - 1, D], the last inputs
  memory: LinearAttentionState  # kv [B, H, K, V]


class MetaLA(Divisible):
  r"""Gated linear attention without keys of its own, which also sees its own token directly.

      u = silu(conv(x)),      q_t = W_q u_t,  v_t = W_v u_t
      a_t = sigmoid(W_a u_t)^(1 / tau),  k_t = 1 - a_t                          one per key channel
      S_t = diag(a_t) S_{t-1} + k_t v_t^T                                           for each head
      y_t = K^(-1/2) S_t^T q_t + sigmoid((q_t . (w * k_t)) v_t)
      out_t = W_o (silu(W_g u_t + b) * LayerNorm(y_t))

  The norm goes over the V channels of each head, without scale and bias. w starts at 0, where the
  second summand is 1/2. All projections read u.

  Args:
    dim: D, the width of input and output.
    num_heads: H.
    expand_k, expand_v: H K / D and H V / D.
    conv_width: the steps that the convolution sees; it has no bias.
    gate_temperature: tau; the larger, the nearer the decays are to 1.
    dtype: of the projections and of q, k, v; decays, norm, the state and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Raises:
    ValueError: a size is not positive, or keys or values do not divide evenly among the heads.

  Source: MetaLA (Chou et al. 2024), section 5, and its published code; kernels start Xavier-uniform
  with gain 2^(-5/2), as those of GLA.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    expand_k: float = 0.5,
    expand_v: float = 1.0,
    conv_width: int = 4,
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
    if not gate_temperature > 0:
      raise ValueError(f"gate_temperature={gate_temperature} must be positive.")
    self.gate_temperature = gate_temperature

    def projection(inputs, outputs):
      init = xavier_uniform(2**-2.5)
      return linear(inputs, outputs, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    check_positive("conv_width", conv_width)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.conv = ShortConvolution(dim, conv_width, use_bias=False, activation="silu", **options)
    self.q_proj, self.a_proj = projection(dim, keys), projection(dim, keys)
    self.v_proj, self.g_proj = projection(dim, values), projection(dim, values)
    self.g_bias = nnx.Param(jnp.zeros(values, param_dtype))
    self.own_gain = nnx.Param(jnp.zeros(keys, param_dtype))
    self.o_proj = projection(values, dim)

  def init_state(self, batch_size: int) -> MetaLAState:
    """The state before the first token: zeros."""
    B = check_positive("batch_size", batch_size)
    kv = jnp.zeros((B, self.num_heads, self.key_dim, self.value_dim), jnp.float32)
    return MetaLAState(self.conv.init_state(B), LinearAttentionState(kv, None))

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: MetaLAState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, MetaLAState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    conv, memory = state if state is not None else (None, None)
    u, conv = self.conv(x, conv, segment_ids)
    heads = lambda z: split_heads(z, self.num_heads)
    q, v = heads(self.q_proj(u)), heads(self.v_proj(u))
    log_decay = heads(jax.nn.log_sigmoid(wide(self.a_proj(u))) / self.gate_temperature)
    k = -jnp.expm1(log_decay)
    y, memory = linear_attention(
      q,
      k.astype(self.dtype),
      v,
      log_decay=log_decay,
      scale=self.key_dim**-0.5,
      axis_name=self.sequence_axis,
      initial_state=memory,
      segment_ids=segment_ids,
    )
    gain = wide(self.own_gain[...]).reshape(self.num_heads, self.key_dim)
    own = jnp.sum(wide(q) * gain * k, axis=-1, keepdims=True)
    # sigmoid(z) - 1/2: the norm takes off any constant, which would only cost digits here.
    y = group_norm(wide(y) + 0.5 * jnp.tanh(0.5 * own * wide(v)))
    gate = wide(self.g_proj(u)) + wide(self.g_bias[...])
    out = self.o_proj(silu_gate(merge_heads(y), gate).astype(self.dtype))
    return out, MetaLAState(conv, memory)

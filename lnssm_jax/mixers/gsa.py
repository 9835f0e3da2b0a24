"""Gated slot attention: softmax attention over a few slots that are written gradually."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_call, check_heads, check_positive
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.initializers import xavier_uniform
from lnssm_jax.mixers.layers import linear, merge_heads, smooth_rms_norm, split_heads, wide
from lnssm_jax.ops import LinearAttentionState
from lnssm_jax.ops.sequence_parallel import linear_attention


class GSAState(NamedTuple):
  """What a layer remembers of a sequence. float32."""

  keys: LinearAttentionState  # kv [B, H, K, M], the slots' keys, transposed
  values: LinearAttentionState  # kv [B, H, M, V], the slots' values


class GSA(Divisible):
  r"""Gated slot attention: M slots, each with a key and a value, that forget and take in.

      q_t = silu(W_q x_t),  k_t = silu(W_k x_t),  v_t = silu(W_v x_t)
      f_t = sigmoid(W_f x_t)^(1 / tau),  s_t = 1 - f_t                                 one per slot
      P_t = diag(f_t) P_{t-1} + s_t k_t^T,  R_t = diag(f_t) R_{t-1} + s_t v_t^T     for each head
      y_t = R_t^T softmax(scale * P_t q_t),      out_t = W_o RMSNorm(silu(y_t))

  Two scans of linear attention with a softmax between them. K = V = D / H. The norm goes over all D
  channels, with a scale for each.

  Args:
    dim: D, the width; a multiple of `num_heads`.
    num_heads: H.
    num_slots: M.
    gate_temperature: tau; the larger, the longer slots remember.
    scale: of the scores; a Python number.
    dtype: of the projections and of q, k, v; decays, scores, norm, the state and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Source: GSA (Zhang et al. 2024), section 3; activations, norm and scale as in its published code,
  whose kernels start Xavier-uniform with gain 2^(-5/2).
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    num_slots: int = 64,
    gate_temperature: float = 8.0,
    scale: float = 1.0,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.head_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    self.num_slots = check_positive("num_slots", num_slots)
    if not gate_temperature > 0:
      raise ValueError(f"gate_temperature={gate_temperature} must be positive.")
    self.gate_temperature, self.scale = gate_temperature, float(scale)

    def projection(outputs=dim):
      init = xavier_uniform(2**-2.5)
      return linear(dim, outputs, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    self.q_proj, self.k_proj, self.v_proj = projection(), projection(), projection()
    self.f_proj = projection(num_heads * num_slots)
    self.norm_gain = nnx.Param(jnp.ones(dim, param_dtype))
    self.o_proj = projection()

  def init_state(self, batch_size: int) -> GSAState:
    """The state before the first token: zeros."""
    B, H = check_positive("batch_size", batch_size), self.num_heads
    K, M = self.head_dim, self.num_slots
    memory = lambda *shape: LinearAttentionState(jnp.zeros((B, H, *shape), jnp.float32), None)
    return GSAState(keys=memory(K, M), values=memory(M, K))

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: GSAState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, GSAState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    keys, values = state if state is not None else (None, None)
    heads = lambda z: split_heads(z, self.num_heads)
    stream = lambda projection: heads(jax.nn.silu(wide(projection(x))).astype(self.dtype))
    q, k, v = stream(self.q_proj), stream(self.k_proj), stream(self.v_proj)
    log_keep = heads(jax.nn.log_sigmoid(wide(self.f_proj(x))) / self.gate_temperature)
    write = -jnp.expm1(log_keep)
    # The scan's output has the dtype of its values: float32 for scores, which softmax magnifies.
    scores, keys = linear_attention(
      q,
      k,
      write,
      value_log_decay=log_keep,
      axis_name=self.sequence_axis,
      initial_state=keys,
      segment_ids=segment_ids,
    )
    y, values = linear_attention(
      jax.nn.softmax(self.scale * scores, axis=-1).astype(self.dtype),
      write.astype(self.dtype),
      v,
      log_decay=log_keep,
      axis_name=self.sequence_axis,
      initial_state=values,
      segment_ids=segment_ids,
    )
    y = smooth_rms_norm(jax.nn.silu(wide(merge_heads(y))), self.norm_gain[...])
    return self.o_proj(y.astype(self.dtype)), GSAState(keys, values)

"""Gated fast weights: a memory that decays along its keys and along its values."""

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_call
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.layers import layer_norm, linear, merge_heads, split_heads, wide
from lnssm_jax.mixers.projections import Projections
from lnssm_jax.ops import LinearAttentionState
from lnssm_jax.ops.sequence_parallel import linear_attention


class GFW(Divisible, Projections):
  r"""Linear attention with a gate for each entry of the memory, the outer product of two gates.

      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t
      a_t = sigmoid(W_a x_t)^(1 / tau),  c_t = sigmoid(W_c x_t)^(1 / tau)    for keys and for values
      S_t = (a_t c_t^T) * S_{t-1} + k_t v_t^T,      y_t = S_t^T q_t                 for each head
      out_t = W_o LayerNorm(y_t)

  Without feature map and normaliser. The norm goes over all D channels, with scale and bias. This
  is the form that the linear complexity sequence model gives to gated fast weights and to the
  decaying update rule (DUR). The original, a convex mixture of memory and written matrix, which the
  compared code does not run, is not offered.

  Args:
    dim: D, the width; a multiple of `num_heads`. V = D / H.
    num_heads: H.
    key_dim: K, the width of a head's queries and keys; None means D / H.
    gate_temperature: tau; the larger, the nearer the decays are to 1.
    num_layers: how many layers the model has, for the initial W_o (see `Projections`).
    dtype: of the projections and of q, k, v; decays, norm, the state and sums are float32.
    param_dtype: of the parameters.

  The state is that of the scan. Cutting a sequence anywhere and passing it on gives the same result
  as one call.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Sources: gated fast weights, Schlag and Schmidhuber 2017; decaying fast weights, Mao 2022; the
  form here, the linear complexity sequence model (Qin et al. 2024), table 1, and its published
  code. W_a and W_c start as W_q does.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    key_dim: int | None = None,
    gate_temperature: float = 16.0,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self._build(
      dim,
      num_heads,
      key_dim=key_dim,
      num_layers=num_layers,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    if not gate_temperature > 0:
      raise ValueError(f"gate_temperature={gate_temperature} must be positive.")
    self.gate_temperature = gate_temperature

    def gate(outputs):
      init = nnx.initializers.normal(0.02)
      return linear(dim, outputs, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    self.a_proj, self.c_proj = gate(num_heads * self.key_dim), gate(dim)
    self.norm_gain = nnx.Param(jnp.ones(dim, param_dtype))
    self.norm_bias = nnx.Param(jnp.zeros(dim, param_dtype))

  def init_state(self, batch_size: int) -> LinearAttentionState:
    """The state before the first token: zeros."""
    return self._empty_memory(batch_size, self.key_dim)

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
    log_gate = lambda projection: split_heads(
      jax.nn.log_sigmoid(wide(projection(x))) / self.gate_temperature, self.num_heads
    )
    q, k, v = (z.astype(self.dtype) for z in self._queries_keys_values(x))
    y, state = linear_attention(
      q,
      k,
      v,
      log_decay=log_gate(self.a_proj),
      value_log_decay=log_gate(self.c_proj),
      axis_name=self.sequence_axis,
      initial_state=state,
      segment_ids=segment_ids,
    )
    y = layer_norm(merge_heads(y), self.norm_gain[...], self.norm_bias[...])
    return self._output(split_heads(y, self.num_heads)), state

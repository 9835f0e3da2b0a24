"""Gated recurrences whose forget gates have a lower bound that rises with depth: HGRN2."""

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
from lnssm_jax.mixers.initializers import uniform_fan_in
from lnssm_jax.mixers.layers import group_norm, linear, merge_heads, split_heads, wide
from lnssm_jax.ops import LinearAttentionState, linear_attention

LOWER_BOUNDS = ("learned", "none")

# Stands for a lower bound of 0 where its logarithm is needed.
_TINY = 1e-30


class HGRN2(nnx.Module):
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
    check_layer(layer, num_layers)
    check_choice("lower_bound", lower_bound, LOWER_BOUNDS)
    init = uniform_fan_in(dim)
    projection = lambda: linear(dim, dim, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    bias = lambda: nnx.Param(init(rngs.params(), (dim,), param_dtype))
    self.q_proj, self.f_proj, self.v_proj = projection(), projection(), projection()
    self.q_bias, self.f_bias, self.v_bias = bias(), bias(), bias()
    if lower_bound == "none":
      self.bound = None
    else:
      depth = jnp.asarray(layer, jnp.float32) / num_layers
      self.bound = nnx.Param(jnp.full(dim, jnp.sqrt(-jnp.log1p(-depth))).astype(param_dtype))
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
      initial_state=state,
      segment_ids=segment_ids,
    )
    y = group_norm(merge_heads(y)) * wide(self.norm_gain[...]) + wide(self.norm_bias[...])
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

"""Linear attention whose scores depend on distance through cosines: cosFormer and LRPE."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.capacity import check_capacity, nan_beyond
from lnssm_jax.mixers.checks import check_call, check_positive
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.layers import layer_norm, merge_heads, split_heads, wide
from lnssm_jax.mixers.projections import Projections
from lnssm_jax.ops import LinearAttentionState, sequence_parallel

# The smallest denominator of cosFormer, as published.
_SMALLEST_SUM = 1e-6


def cosine_features(
  x: jax.Array,  # [B, T, H, K]
  positions: jax.Array,  # [B, T] integer
  theta: jax.Array | float,  # [H, K] or one number, radians a step
) -> jax.Array:
  """(x cos(t theta), x sin(t theta)), [B, T, H, 2 K] in float32 at least.

  The product of those of q at t and of k at s is sum_i q_i k_i cos((t - s) theta_i).
  """
  x = wide(x)
  angle = positions[..., None, None].astype(x.dtype) * jnp.asarray(theta, x.dtype)
  return jnp.concatenate([x * jnp.cos(angle), x * jnp.sin(angle)], axis=-1)


class PositionalState(NamedTuple):
  """What a layer remembers of a sequence."""

  memory: LinearAttentionState  # kv [B, H, 2 K, V] float32; cosFormer has one more value column
  position: jax.Array  # [B] int32, the number of tokens of the segment so far


class _PositionalAttention(Divisible, Projections):
  """What both share: the state, and the positions that follow from it."""

  _extra_columns = 0

  def init_state(self, batch_size: int) -> PositionalState:
    """The state before the first token: zeros."""
    B, H = check_positive("batch_size", batch_size), self.num_heads
    columns = self.value_dim + self._extra_columns
    kv = jnp.zeros((B, H, 2 * self.key_dim, columns), jnp.float32)
    return PositionalState(LinearAttentionState(kv, None), jnp.zeros(B, jnp.int32))

  def _positions(self, x, state, segment_ids):
    B, T, _ = x.shape
    before = None if state is None else state.position
    return sequence_parallel.step_positions(B, T, segment_ids, before, axis_name=self.sequence_axis)

  def _read(self, q, k, v, positions, last, theta, state, segment_ids):
    y, memory = sequence_parallel.linear_attention(
      cosine_features(q, positions, theta).astype(self.dtype),
      cosine_features(k, positions, theta).astype(self.dtype),
      v.astype(self.dtype),
      axis_name=self.sequence_axis,
      initial_state=None if state is None else state.memory,
      segment_ids=segment_ids,
    )
    return wide(y), PositionalState(memory, last)


class CosFormer(_PositionalAttention):
  r"""Linear attention of rectified queries and keys, weighted by a cosine of the distance.

      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t
      w_ts = relu(q_t) . relu(k_s) cos((t - s) pi / (2 M))                          for each head
      y_t = sum_{s <= t} w_ts v_s / max(sum_{s <= t} w_ts, 1e-6),      out_t = W_o y_t

  by features of width 2 K. M is `max_length`, fixed, where the published code takes the length of
  the present sequence, on which the past must not depend. Further apart than M the cosine would be
  negative: a longer sequence has no result. Where that is known when the layer is called (the
  length of x without segments, and a state outside of `jit`), it is an error; elsewhere the outputs
  from step M of the sequence on are NaN.

  Args:
    dim: D, the width; a multiple of `num_heads`. K = V = D / H.
    num_heads: H.
    max_length: M, the most tokens of one sequence, over all calls that pass the state on.
    use_bias: whether the four projections have a bias.
    num_layers: how many layers the model has, for the initial W_o (see `Projections`).
    dtype: of the projections, the features and v; the state and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call. The last
  value column of the state is the sum of the keys' features.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Source: cosFormer (Qin et al. 2022), section 3.2, and its published code.
  """

  _extra_columns = 1

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    max_length: int = 2048,
    use_bias: bool = False,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.max_length = check_positive("max_length", max_length)
    self._build(
      dim,
      num_heads,
      use_bias=use_bias,
      num_layers=num_layers,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: PositionalState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, PositionalState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong, or the sequence gets longer than `max_length`; the
        message names the argument.
    """
    check_call(self, x, state, segment_ids)
    before = None if state is None else state.position
    check_capacity(
      "CosFormer", x.shape[1], before, segment_ids, self.max_length, self.sequence_axis
    )
    positions, last = self._positions(x, state, segment_ids)
    q, k, v = self._queries_keys_values(x)
    v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    theta = math.pi / (2 * self.max_length)
    q, k = jax.nn.relu(q), jax.nn.relu(k)
    y, state = self._read(q, k, v, positions, last, theta, state, segment_ids)
    out = self._output(y[..., :-1] / jnp.maximum(y[..., -1:], _SMALLEST_SUM))
    return nan_beyond(out, positions, self.max_length), state


class LRPE(_PositionalAttention):
  r"""Linear attention with linearized relative positions: each channel turns at a learned speed.

      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t
      y_t = sum_{s <= t} (sum_i q_ti k_si cos((t - s) theta_i)) v_s                 for each head
      out_t = W_o LayerNorm(y_t)

  by features of width 2 K; without decay, feature map and normaliser. theta [D] starts at
  10000^(-2 i / D), i over all channels. The norm goes over all D channels, with scale and bias.

  Args:
    dim: D, the width; a multiple of `num_heads`. K = V = D / H.
    num_heads: H.
    use_bias: whether the four projections have a bias.
    num_layers: how many layers the model has, for the initial W_o (see `Projections`).
    dtype: of the projections, the features and v; angles, norm, the state and sums are float32, so
      that an angle is known to about 6e-8 of itself.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Sources: LRPE (Qin et al. 2023), section 3, its unitary real form; as a layer, with its norm, in
  the linear complexity sequence model (Qin et al. 2024), section 2.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    use_bias: bool = False,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self._build(
      dim,
      num_heads,
      use_bias=use_bias,
      num_layers=num_layers,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.theta = nnx.Param((10000.0 ** (-2 * jnp.arange(dim) / dim)).astype(param_dtype))
    self.norm_gain = nnx.Param(jnp.ones(dim, param_dtype))
    self.norm_bias = nnx.Param(jnp.zeros(dim, param_dtype))

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: PositionalState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, PositionalState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    positions, last = self._positions(x, state, segment_ids)
    q, k, v = self._queries_keys_values(x)
    theta = self.theta[...].reshape(self.num_heads, self.key_dim)
    y, state = self._read(q, k, v, positions, last, theta, state, segment_ids)
    y = layer_norm(merge_heads(y), self.norm_gain[...], self.norm_bias[...])
    return self._output(split_heads(y, self.num_heads)), state

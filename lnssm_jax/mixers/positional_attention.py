"""Linear attention whose scores depend on distance through cosines: cosFormer and LRPE."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.capacity import check_capacity, nan_beyond
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.mixers.common.norms import LayerNorm
from lnssm_jax.mixers.common.positions import cosine_features
from lnssm_jax.mixers.common.projections import merge_heads, split_heads
from lnssm_jax.mixers.common.qkv import QKVMixer
from lnssm_jax.ops import LinearAttentionState, linear_attention
from lnssm_jax.ops.core.halo import step_positions
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state

# The smallest denominator of cosFormer, as published.
_SMALLEST_SUM = 1e-6


@register_state
class PositionalState(NamedTuple):
  """Recurrent state of `CosFormer` and `LRPE`."""

  recurrent: LinearAttentionState  # kv [B, H, 2 K, V] float32; cosFormer has one more value column
  position: jax.Array  # [B] int32, the number of tokens of the segment so far


class _PositionalAttention(QKVMixer[PositionalState]):
  """The state, the positions that follow from it, and linear attention with cosine features."""

  _extra_columns = 0
  recurrence_flops = functools.partialmethod(flops.linear_attention, decays=0)

  def _init_state(self, B):
    shape = (B, self.num_heads, 2 * self.key_dim, self.value_dim + self._extra_columns)
    recurrent = LinearAttentionState(jnp.zeros(shape, jnp.float32), None)
    return PositionalState(recurrent, jnp.zeros(B, jnp.int32))

  def _positions(self, x, state, segment_ids):
    B, T, _ = x.shape
    before = None if state is None else state.position
    return step_positions(B, T, segment_ids, before, axis_name=self.sequence_axis)

  def _read(self, q, k, v, positions, last, theta, state, segment_ids):
    y, recurrent = linear_attention(
      cosine_features(q, positions, theta).astype(self.dtype),
      cosine_features(k, positions, theta).astype(self.dtype),
      v.astype(self.dtype),
      scale=1.0,
      **self._place(None if state is None else state.recurrent, segment_ids),
    )
    return wide(y), PositionalState(recurrent, last)


class CosFormer(_PositionalAttention):
  r"""Linear attention of rectified queries and keys, weighted by a cosine of the distance.

      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t
      w_ts = relu(q_t) . relu(k_s) cos((t - s) pi / (2 M))                         per head
      y_t = sum_{s <= t} w_ts v_s / max(sum_{s <= t} w_ts, 1e-6),      out_t = W_o y_t

  with features of width 2 K. M is `max_length`, a constant, where the published code takes the
  length of the current sequence, on which the past must not depend. Beyond M the cosine would be
  negative, so longer sequences are rejected: with an error where the length is known when the layer
  is called (no segments, and a state outside of `jit`); elsewhere the outputs from token M on are
  NaN.

  Args:
    dim: D, the width; a multiple of `num_heads`. K = V = D / H.
    num_heads: H.
    max_length: M, the maximum number of tokens of one sequence, over all calls that carry a state.
    use_bias: whether the four projections have a bias.
    num_layers: of the model, for the initial W_o (see `QKVMixer`).
    dtype: of the projections, the features and v; state and sums are float32.
    param_dtype: of the parameters.

  The last value column of the state is the sum of the keys' features.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Source: cosFormer (Qin et al. 2022), section 3.2, and its published code.
  """

  name = "cosformer"
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
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    super().__init__(dim, num_heads=num_heads, use_bias=use_bias, num_layers=num_layers, **options)

  def _mix(self, x, state, segment_ids):
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
  r"""Linear attention with linearized relative positions: each channel rotates at a learned speed.

      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t
      y_t = sum_{s <= t} (sum_i q_ti k_si cos((t - s) theta_i)) v_s                per head
      out_t = W_o LayerNorm(y_t)

  with features of width 2 K; without decay, feature map and normalizer. theta [D] starts at
  10000^(-2 i / D), i over all channels. The norm is over all D channels, with scale and bias.

  Args:
    dim: D, the width; a multiple of `num_heads`. K = V = D / H.
    num_heads: H.
    use_bias: whether the four projections have a bias.
    norm_eps: eps of the norm, under the root.
    num_layers: of the model, for the initial W_o (see `QKVMixer`).
    dtype: of the projections, the features and v; angles, norm, state and sums are float32, so that
      the relative error of an angle is about 6e-8.
    param_dtype: of the parameters.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Sources: LRPE (Qin et al. 2023), section 3, its unitary real form; as a layer, with its norm, in
  the linear complexity sequence model (Qin et al. 2024), section 2.
  """

  name = "lrpe"

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    use_bias: bool = False,
    norm_eps: float = 1e-5,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    super().__init__(dim, num_heads=num_heads, use_bias=use_bias, num_layers=num_layers, **options)
    self.theta = nnx.Param((10000.0 ** (-2 * jnp.arange(dim) / dim)).astype(param_dtype))
    self.norm = LayerNorm(dim, eps=norm_eps, param_dtype=param_dtype)

  def _mix(self, x, state, segment_ids):
    positions, last = self._positions(x, state, segment_ids)
    q, k, v = self._queries_keys_values(x)
    theta = self.theta[...].reshape(self.num_heads, self.key_dim)
    y, state = self._read(q, k, v, positions, last, theta, state, segment_ids)
    return self._output(split_heads(self.norm(merge_heads(y)), self.num_heads)), state

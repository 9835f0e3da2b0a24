"""Linear log-normal attention (LLN): features exp(a q), exp(b k) that mimic softmax's weights."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.activations import feature_dtype
from lnssm_jax.mixers.common.checks import check_choice
from lnssm_jax.mixers.common.qkv import QKVMixer
from lnssm_jax.ops import (
  AttentionState,
  DiagonalState,
  LinearAttentionState,
  attention,
  diagonal_scan,
  linear_attention,
)
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.segments import segments_of
from lnssm_jax.ops.core.states import register_state

MATCHINGS = ("running", "none")
MIXTURES = ("mean", "convex", "free")

# The variance of the logarithm of LLN's weights, fitted as slope * (variance of their exponent)
# + intercept. Source: the published code.
_SLOPE = 0.14855178144710912
_INTERCEPT = -0.35487039130661086

# A variance of 0, as that of a token that is 0, has no inverse.
_SMALLEST_VARIANCE = 1e-12

# The maximum of nothing; -inf minus itself would be NaN.
_NO_MAXIMUM = -1e38


@register_state
class LLNState(NamedTuple):
  """Recurrent state of `LLN`."""

  moments: (
    DiagonalState  # h [B, 5] float32: the number of tokens; sums of the means of q, q^2, k, k^2
  )
  highest: jax.Array  # [B, H, K] float32, the largest exponent of each key channel
  recurrent: LinearAttentionState  # kv [B, H, K, V], key_sum [B, H, K] float32, / exp(highest)
  block: AttentionState  # the keys and values of the last block, in `dtype`


class LLN(QKVMixer[LLNState]):
  r"""Linear attention by log-normal features, averaged with softmax attention in short blocks.

      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t
      S_t = S_{t-1} + exp(beta_t k_t) v_t^T,  z_t = z_{t-1} + exp(beta_t k_t)       per head
      y_t = S_t^T exp(alpha_t q_t) / (exp(alpha_t q_t)^T z_t)
      d_t = softmax attention of token t to its own block, of K tokens
      out_t = W_o (y_t + d_t) / 2

  Moment matching: alpha = s / sigma_q and beta = s / sigma_k give the logarithms of the weights the
  variance that they have in softmax attention, with

      s^2 = (sigma_q^2 sigma_k^2 - b) / (2 a),     a = 0.1486, b = -0.3549 (fitted by the authors)

  sigma_q, sigma_k are the standard deviations of all elements of q and k; no gradient flows to
  them. The published ones are those of a whole batch, in which a token depends on its future. Here
  they are running ones, of the sequence up to t, over all heads; a key keeps the beta of its token.
  matching="none" sets alpha = beta = 1.

  Every sum is divided by exp of the largest beta k so far in its channel, and the feature of q
  multiplied with it: exact, for exponents of any size, and the denominator is at least 1. (The
  published code subtracts the maximum over all times, and adds an epsilon to the denominator.)

  Args:
    dim: D, the width; a multiple of `num_heads`. K = V = D / H, which is also the block length.
    num_heads: H.
    matching: "running" or "none".
    mixture: "mean" as above; "convex" for r y + (1 - r) d, and "free" for r y + p d, with learned
      r and p [D] that start at 1/2.
    use_bias: whether the four projections have a bias.
    num_layers: of the model, for the initial W_o (see `QKVMixer`).
    dtype: of the projections, the features and v; moments, exponents, state and sums are
      float32, except the block's keys and values.
    param_dtype: of the parameters.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive, or an option is
      unknown.

  Source: linear log-normal attention (Nahshan et al. 2023), sections 3-4, and its published code.
  """

  name = "lln"
  can_shard_time = False
  needs_length = True
  no_recurrence = "is softmax within blocks of tokens, averaged with its linear attention"

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    matching: str = "running",
    mixture: str = "mean",
    use_bias: bool = False,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.matching = check_choice("matching", matching, MATCHINGS)
    self.mixture = check_choice("mixture", mixture, MIXTURES)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    super().__init__(dim, num_heads=num_heads, use_bias=use_bias, num_layers=num_layers, **options)
    half = lambda wanted: nnx.Param(jnp.full(dim, 0.5, param_dtype)) if wanted else None
    self.lln_gain, self.block_gain = half(mixture != "mean"), half(mixture == "free")

  def recurrence_flops(self, state, length):
    """FLOPs of the linear attention and of softmax in blocks."""
    return flops.linear_attention(self, state, length) + flops.attention(self, state, length)

  def _init_state(self, B):
    H, K = self.num_heads, self.key_dim
    return LLNState(
      moments=DiagonalState(jnp.zeros((B, 5), jnp.float32)),
      highest=jnp.full((B, H, K), _NO_MAXIMUM, jnp.float32),
      recurrent=self._empty_recurrent(B, normalize=True),
      block=attention.init_state(batch=B, kv_heads=H, key_dim=K, block=K, dtype=self.dtype),
    )

  def _mix(self, x, state, segment_ids):
    block = None if state is None else state.block
    state = self._init_state(x.shape[0]) if state is None else state
    q, k, v = self._queries_keys_values(x)
    near, block = self._in_blocks(q, k, v, block, segment_ids)
    q, k, moments = self._matched(q, k, state.moments, segment_ids)
    q, k, log_decay, highest = _bounded_exponents(q, k, state.highest, segment_ids)
    dtype = feature_dtype(self.dtype)
    far, recurrent = linear_attention(
      jnp.exp(q).astype(dtype),
      jnp.exp(k).astype(dtype),
      v.astype(self.dtype),
      log_decay=log_decay,
      normalize=True,
      initial_state=state.recurrent,
      segment_ids=segment_ids,
    )
    out = self._output(self._mixed(wide(far), wide(near)))
    return out, LLNState(moments, highest, recurrent, block)

  def _log_decays(self, x, state, segment_ids):
    return []  # the op's decays change the scale of the sums; no token is forgotten

  def _in_blocks(self, q, k, v, state, segment_ids) -> tuple[jax.Array, Any]:
    q, k, v = (z.astype(self.dtype) for z in (q, k, v))
    return attention(q, k, v, block=self.key_dim, initial_state=state, segment_ids=segment_ids)

  def _matched(self, q, k, moments, segment_ids):
    """alpha q, beta k [B, T, H, K], and the moments after the last token."""
    mean = lambda z: jnp.mean(jax.lax.stop_gradient(z), axis=(-2, -1))
    summands = (jnp.ones(q.shape[:2], q.dtype), mean(q), mean(q**2), mean(k), mean(k**2))
    summands = jnp.stack(summands, axis=-1)
    sums, moments = diagonal_scan(
      jnp.ones(5, summands.dtype), summands, initial_state=moments, segment_ids=segment_ids
    )
    if self.matching == "none":
      return q, k, moments
    steps, q_sum, q_square, k_sum, k_square = jnp.moveaxis(sums, -1, 0)

    def variance(total, square):
      return jnp.maximum(square / steps - jnp.square(total / steps), _SMALLEST_VARIANCE)

    q_variance, k_variance = variance(q_sum, q_square), variance(k_sum, k_square)
    matched = (q_variance * k_variance - _INTERCEPT) / (2 * _SLOPE)
    alpha, beta = jnp.sqrt(matched / q_variance), jnp.sqrt(matched / k_variance)
    return alpha[..., None, None] * q, beta[..., None, None] * k, moments

  def _mixed(self, far, near):
    if self.lln_gain is None:
      return (far + near) / 2
    gain = wide(self.lln_gain[...]).reshape(self.num_heads, self.value_dim)
    other = 1 - gain
    if self.block_gain is not None:
      other = wide(self.block_gain[...]).reshape(self.num_heads, self.value_dim)
    return gain * far + other * near


def _bounded_exponents(q, k, before, segment_ids):
  """(q, k, log decay, highest): exponents of at most 0 that give the same weighted means.

  With m the running maximum of k in each channel, exp(k - m) is added to sums that are multiplied
  by exp(m_{t-1} - m_t): they are the sums of exp(k), divided by exp(m_t). `before` [B, H, K] is m
  before the first token. The divisor cancels, so that it needs no gradient.
  """
  fixed = jax.lax.stop_gradient(k)
  fixed = fixed.at[:, 0].max(before.astype(k.dtype))
  segments = segments_of("LLN", segment_ids, *k.shape[:2])
  if segments is None:
    highest = jax.lax.cummax(fixed, axis=1)
  else:

    def later(first, second):
      (_, maximum), (restarts, value) = first, second
      kept = jnp.where(restarts, value, jnp.maximum(maximum, value))
      return first[0] | restarts, kept

    restarts = jnp.broadcast_to(segments.first()[..., None, None], fixed.shape)
    _, highest = jax.lax.associative_scan(later, (restarts, fixed), axis=1)
  previous = jnp.concatenate([before.astype(k.dtype)[:, None], highest[:, :-1]], axis=1)
  q = q + highest
  q = q - jax.lax.stop_gradient(jnp.max(q, axis=-1, keepdims=True))
  # At the start of a segment the difference may be positive, and multiplies nothing.
  log_decay = jax.lax.stop_gradient(jnp.minimum(previous - highest, 0))
  return q, k - highest, log_decay, highest[:, -1]

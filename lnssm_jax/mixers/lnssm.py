"""The time mixer of the log-normal state-space model (LNSSM)."""

from typing import NamedTuple

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
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.initializers import channel_decay, orthogonal, shift_weight
from lnssm_jax.mixers.layers import interpolate, last_input, rms_norm, token_shift
from lnssm_jax.ops import LinearAttentionState
from lnssm_jax.ops.checks import accumulation_dtype
from lnssm_jax.ops.sequence_parallel import linear_attention

SHIFTS = ("qkvg", "kvg")

# The published norm divides by rms + 1e-8, and W_q = W_k = 0 at the start, where its derivative is
# 1e8. On the first step that reaches q and k (the second, as W_o = 0 too) their gradient is then a
# million times the usual one. With clipping, that step is lost for all other parameters. Without,
# Adam's second moment holds W_q and W_k still for thousands of steps: in a model of width 64 the
# norm of W_q rose from 1.1 at step 20 to 1.3 at step 300, and from 1.0 to 4.0 with this floor.
# Below the floor the norm is linear, of slope 100, about the slope found after one optimiser step;
# above it nothing changes.
_RMS_EPS = 1e-8
_RMS_FLOOR = 1e-2

# |k^| <= sqrt(D) only while gamma = 1, and gamma is learned: exp(20) = 4.9e8 leaves room for any
# length in float32.
_LARGEST_EXPONENT = 20.0


class LNSSMState(NamedTuple):
  """What a layer remembers of a sequence, as large after one token as after a million. float32."""

  shift: jax.Array  # [B, D], the last input
  memory: LinearAttentionState  # kv [B, H, K, K], key_sum [B, H, K]


class LNSSM(Divisible):
  r"""Attention by log-normal features with a constant decay per channel, in time linear in T.

      x^s_t = mu_s * x_t + (1 - mu_s) * x_{t-1}             one stream for each of q, k, v, g
      q_t = gamma * RMSNorm(W_q x^q_t),  k_t = gamma * RMSNorm(W_k x^k_t),  v_t = W_v x^v_t
      S_t = diag(a) S_{t-1} + exp(k_t) v_t^T,  z_t = a * z_{t-1} + exp(k_t)      for each head
      y_t = S_t^T exp(q_t) / (exp(q_t)^T z_t)
      out_t = W_o (sigmoid(W_g x^g_t) * y_t)

  The norm goes over all D channels, with one scale gamma [D] for both q and k. The decay is
  a = exp(-exp(w)), constant in time, one for each key channel.

  y_t is a weighted mean of v_1 ... v_t, so it never exceeds the largest of them, and the
  denominator needs no epsilon. Initially W_q, W_k, W_g and W_o are zero: the output is 0, and y is
  a decayed mean.

  Args:
    dim: D, the width; a multiple of `num_heads`. The width of a head is K = D / H, for keys and
      values.
    layer, num_layers: where the layer stands in its model, for the initial decays and shifts.
      `layer` counts from 0 and may be traced, so that `vmap` can make all layers at once.
    shift: which streams see the token before: "qkvg" (the published code), or "kvg" (the paper's
      text: q reads x_t alone, and there is no mu_q).
    decay_first: eq. 14 prints two forms that differ. True is the state form above, which the
      paper's other equations and its code follow: a token d steps back has weight a^d. With False
      the state is read before it decays, and the weights are 1, 1, a, a^2, ...
    dtype: of the projections, the features and v. float16 cannot hold the features, which then stay
      float32.
    param_dtype: of the parameters.

  Sums, decays, norms and the state are float32 (float64 for float64 inputs). Cutting a sequence
  anywhere and passing the state on gives the same result as one call.

  One deviation from the published RMSNorm, x / (rms(x) + 1e-8): where rms(x) < 0.01 the divisor is
  0.01 + 1e-8, which bounds the gradient at the zero initialisation; see the comment on `_RMS_EPS`.
  And k is clipped to +-20 before exp.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive, or `shift` is
      unknown.

  Sources: LNSSM, eqs. 14-15 and 19; token shift, norm, gate and initialisation as in its published
  code.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    shift: str = "qkvg",
    decay_first: bool = True,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.head_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    self.shift = check_choice("shift", shift, SHIFTS)
    self.decay_first = decay_first
    check_layer(layer, num_layers)

    param = lambda value: nnx.Param(value.astype(param_dtype))
    place = {"layer": layer, "num_layers": num_layers}
    self.mu_q = param(shift_weight(dim, **place)) if shift == "qkvg" else None
    self.mu_k = param(shift_weight(dim, **place))
    self.mu_v = param(shift_weight(dim, **place, offset=0.3))
    self.mu_g = param(shift_weight(dim, **place, power=0.5))
    self.gamma = param(jnp.ones(dim))
    self.w = param(channel_decay(dim, **place))

    def projection(kernel_init):
      return nnx.Linear(
        dim,
        dim,
        use_bias=False,
        kernel_init=kernel_init,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
      )

    zeros = nnx.initializers.zeros_init()
    self.q_proj, self.k_proj = projection(zeros), projection(zeros)
    self.v_proj = projection(orthogonal(1.0))
    self.g_proj, self.o_proj = projection(zeros), projection(zeros)

  def init_state(self, batch_size: int) -> LNSSMState:
    """The state before the first token: zeros."""
    B, H, K = check_positive("batch_size", batch_size), self.num_heads, self.head_dim
    memory = LinearAttentionState(
      kv=jnp.zeros((B, H, K, K), jnp.float32), key_sum=jnp.zeros((B, H, K), jnp.float32)
    )
    return LNSSMState(shift=jnp.zeros((B, self.dim), jnp.float32), memory=memory)

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: LNSSMState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, LNSSMState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    B, T, D = x.shape
    previous, memory = state if state is not None else (None, None)
    shifted = token_shift(x, previous, segment_ids, axis_name=self.sequence_axis)
    stream = lambda mu: interpolate(x, shifted, mu[...]).astype(self.dtype)
    heads = lambda z: z.reshape(B, T, self.num_heads, self.head_dim)

    q = self.q_proj(x if self.mu_q is None else stream(self.mu_q))
    k, v = self.k_proj(stream(self.mu_k)), self.v_proj(stream(self.mu_v))
    gate = jax.nn.sigmoid(self.g_proj(stream(self.mu_g)))

    q_features, k_features = self._features(heads(self._norm(q)), heads(self._norm(k)))
    w = self.w[...].reshape(self.num_heads, self.head_dim)
    log_decay = -jnp.exp(w.astype(accumulation_dtype(w)))
    y, memory = linear_attention(
      q_features,
      k_features,
      heads(v),
      log_decay=log_decay,
      bonus=None if self.decay_first else jnp.ones_like(log_decay),
      normalize=True,
      axis_name=self.sequence_axis,
      initial_state=memory,
      segment_ids=segment_ids,
    )
    last = last_input(x, self.sequence_axis)
    return self.o_proj(gate * y.reshape(B, T, D)), LNSSMState(last, memory)

  def _norm(self, z):
    return rms_norm(z, self.gamma[...], eps=_RMS_EPS, floor=_RMS_FLOOR)

  def _features(self, q, k):
    """exp(q), exp(k) [B, T, H, K]; that of q up to a factor per token, which cancels in y."""
    q = q - jax.lax.stop_gradient(jnp.max(q, axis=-1, keepdims=True))
    k = jnp.clip(k, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    feature_dtype = q.dtype if self.dtype == jnp.float16 else self.dtype
    return jnp.exp(q).astype(feature_dtype), jnp.exp(k).astype(feature_dtype)

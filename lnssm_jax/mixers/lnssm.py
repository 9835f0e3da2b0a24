"""The time mixer of the log-normal state-space model (LNSSM)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import check_choice, check_heads, check_layer, check_norm_eps
from lnssm_jax.mixers.common.initializers import channel_decay, orthogonal, shift_weight
from lnssm_jax.mixers.common.norms import rms_norm_with_floor
from lnssm_jax.mixers.common.projections import Linear
from lnssm_jax.mixers.common.token_shift import interpolated, last_input
from lnssm_jax.ops import LinearAttentionState, linear_attention
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state

SHIFTS = ("qkvg", "kvg", "kv", "none")
FEATURE_MAPS = ("exp", "elu", "identity")
NORM_ORDERS = ("before", "after", "none")

# The published norm divides by rms + 1e-8, and W_q = W_k = 0 at the start, where its derivative is
# 1e8. On the first step that reaches q and k (the second, as W_o = 0 too) their gradient is then a
# million times the usual one. With clipping, that step is lost for all other parameters. Without,
# Adam's second moment freezes W_q and W_k for thousands of steps: in a model of width 64 the norm
# of W_q rose from 1.1 at step 20 to 1.3 at step 300, and from 1.0 to 4.0 with this floor. Below the
# floor the norm is linear, of slope 100, about the slope found after one optimizer step; above it
# nothing changes.
_RMS_FLOOR = 1e-2

# |k^| <= sqrt(D) only while gamma = 1, and gamma is learned: exp(20) = 4.9e8 leaves room for any
# length in float32.
_LARGEST_EXPONENT = 20.0


@register_state
class LNSSMState(NamedTuple):
  """Recurrent state of `LNSSM`, float32."""

  shift: jax.Array  # [B, D], the last input
  recurrent: LinearAttentionState  # kv [B, H, K, K], key_sum [B, H, K]


class LNSSM(Mixer[LNSSMState]):
  r"""Normalized linear attention with log-normal features and a constant decay per channel.

      x^s_t = mu_s * x_t + (1 - mu_s) * x_{t-1}             one stream for each of q, k, v, g
      q_t = gamma * RMSNorm(W_q x^q_t),  k_t = gamma * RMSNorm(W_k x^k_t),  v_t = W_v x^v_t
      S_t = diag(a) S_{t-1} + exp(k_t) v_t^T,  z_t = a * z_{t-1} + exp(k_t)        per head
      y_t = S_t^T exp(q_t) / (exp(q_t)^T z_t)
      out_t = W_o (sigmoid(W_g x^g_t) * y_t)

  The norm is over all D channels, with one scale gamma [D] for both q and k. The decay is
  a = exp(-exp(w)), constant in time, one per key channel.

  y_t is a weighted mean of v_1 ... v_t, so it never exceeds the largest of them, and the
  denominator needs no epsilon. Initially W_q, W_k, W_g and W_o are zero: the output is 0, and y is
  a decayed mean.

  Args:
    dim: D, the width; a multiple of `num_heads`. The width of a head is K = D / H, for keys and
      values.
    num_heads: H.
    layer, num_layers: the layer's index in its model, for the initial decays and shifts. `layer`
      counts from 0 and may be traced, so that `vmap` can initialize all layers at once.
    shift: the streams that see the previous token: "qkvg" (the published code), "kvg" (an earlier
      build of it), "kv" (the paper's words), or "none". The others read x_t alone, without a mu.
    decay_first: eq. 14 prints two forms that differ. True is the state form above, which the
      paper's other equations and its code follow: a token d positions back has weight a^d. With
      False the state is read before it decays, and the weights are 1, 1, a, a^2, ...
    feature_map: of queries and keys. "exp", or without the log-normal features: "elu" for elu + 1,
      or "identity", where sums of weights may vanish and y_t = K^(-1/2) S_t^T q_t is not divided.
    use_decay: without it a = 1 (eqs. 12-13), and there is no w.
    use_gate: without it out_t = W_o y_t, and there is no W_g.
    norm: "before" the feature map, as the published code has it; "after" it, as the paper's words
      may be read; or "none".
    norm_eps: added to the root mean square of queries and keys.
    dtype: of the projections, the features and v. float16 cannot represent the features, which then
      stay float32.
    param_dtype: of the parameters.

  The options from `shift` to `norm` are for ablations; no published model has others than the
  defaults. Sums, decays, norms and the state are float32 (float64 for float64 inputs).

  Deviations: the published RMSNorm is x / (rms(x) + 1e-8); here, where rms(x) < 0.01 the divisor is
  0.01 + 1e-8, which bounds the gradient at the zero initialization (see the comment on
  `_RMS_FLOOR`). And k is clipped to +-20 before exp.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive, or `shift`,
      `feature_map` or `norm` is unknown.

  Sources: LNSSM, eqs. 14-15 and 19; token shift, norm, gate and initialization as in its published
  code.
  """

  name = "lnssm"
  set_by_model = ("num_heads", "layer", "num_layers")
  recurrence_flops = flops.linear_attention

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    shift: str = "qkvg",
    decay_first: bool = True,
    feature_map: str = "exp",
    use_decay: bool = True,
    use_gate: bool = True,
    norm: str = "before",
    norm_eps: float = 1e-8,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.head_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    self.shift = check_choice("shift", shift, SHIFTS)
    self.decay_first, self.norm_eps = decay_first, check_norm_eps(norm_eps)
    check_layer(layer, num_layers)

    param = lambda value: nnx.Param(value.astype(param_dtype))
    place = {"layer": layer, "num_layers": num_layers}
    self.feature_map = check_choice("feature_map", feature_map, FEATURE_MAPS)
    self.norm = check_choice("norm", norm, NORM_ORDERS)
    shifted = "" if shift == "none" else shift if use_gate else shift.replace("g", "")
    mu = lambda name, **more: param(shift_weight(dim, **place, **more)) if name in shifted else None
    self.mu_q, self.mu_k = mu("q"), mu("k")
    self.mu_v, self.mu_g = mu("v", offset=0.3), mu("g", power=0.5)
    self.gamma = None if norm == "none" else param(jnp.ones(dim))
    self.w = param(channel_decay(dim, **place)) if use_decay else None

    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    zeros = nnx.initializers.zeros_init()
    linear = functools.partial(Linear, dim, dim, **options)
    self.q_proj, self.k_proj = linear(kernel_init=zeros), linear(kernel_init=zeros)
    self.v_proj = linear(kernel_init=orthogonal(1.0))
    self.g_proj = linear(kernel_init=zeros) if use_gate else None
    self.o_proj = linear(kernel_init=zeros)

  def _init_state(self, B):
    H, K = self.num_heads, self.head_dim
    key_sum = None if self.feature_map == "identity" else jnp.zeros((B, H, K), jnp.float32)
    recurrent = LinearAttentionState(kv=jnp.zeros((B, H, K, K), jnp.float32), key_sum=key_sum)
    return LNSSMState(jnp.zeros((B, self.dim), jnp.float32), recurrent)

  def _mix(self, x, state, segment_ids):
    B, T, D = x.shape
    previous, recurrent = state if state is not None else (None, None)
    streams = self._streams(x, previous, segment_ids)
    heads = lambda z: z.reshape(B, T, self.num_heads, self.head_dim)

    q, k, v = (self.q_proj(streams["q"]), self.k_proj(streams["k"]), self.v_proj(streams["v"]))
    q_features, k_features = self._features(q, k)
    log_decay = None
    if self.w is not None:
      log_decay = -jnp.exp(wide(self.w[...].reshape(self.num_heads, self.head_dim)))
    ones = jnp.ones((self.num_heads, self.head_dim), wide(q).dtype)
    y, recurrent = linear_attention(
      heads(q_features),
      heads(k_features),
      heads(v),
      log_decay=log_decay,
      bonus=None if self.decay_first else ones,
      normalize=self.feature_map != "identity",
      **self._place(recurrent, segment_ids),
    )
    last = last_input(x, self.sequence_axis)
    y = y.reshape(B, T, D)
    if self.g_proj is not None:
      y = jax.nn.sigmoid(self.g_proj(streams["g"])) * y
    return self.o_proj(y), LNSSMState(last, recurrent)

  def exponents(
    self, x: jax.Array, segment_ids: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array] | None:
    """The exponents of the features, log Phi(q) and log Phi(k), each [B, T, H, K], float32.

    The layer itself divides Phi(q) by its largest entry, which cancels in y. None where features
    are no exponentials: with another `feature_map`, or a norm after it.
    """
    self._check(x, None, segment_ids)
    if self.feature_map != "exp" or self.norm == "after":
      return None
    streams = self._streams(x, None, segment_ids)
    q, k = self._exponents(self.q_proj(streams["q"]), self.k_proj(streams["k"]))
    heads = lambda z: z.reshape(*z.shape[:2], self.num_heads, self.head_dim)
    return heads(q), heads(jnp.clip(k, -_LARGEST_EXPONENT, _LARGEST_EXPONENT))

  def _streams(self, x, previous, segment_ids):
    """The inputs [B, T, D] of q, k, v and g, by name."""
    mus = {"k": self.mu_k, "v": self.mu_v, "g": self.mu_g, "q": self.mu_q}
    weights = {name: mu for name, mu in mus.items() if mu is not None}
    streams = dict.fromkeys(mus, x)
    if weights:
      place = {"axis_name": self.sequence_axis, "dtype": self.dtype}
      shifted = interpolated(x, [*weights.values()], previous, segment_ids, **place)
      streams |= zip(weights, shifted, strict=True)
    return streams

  def _norm(self, z):
    return rms_norm_with_floor(z, self.gamma[...], eps=self.norm_eps, floor=_RMS_FLOOR)

  def _exponents(self, q, k):
    """Arguments of the feature map, in float32 at least."""
    if self.norm == "before":
      q, k = self._norm(q), self._norm(k)
    return wide(q), wide(k)

  def _features(self, q, k):
    """The features of q and k [B, T, D]; of q up to a factor per head, which cancels in y."""
    q, k = self._exponents(q, k)
    dtype = q.dtype if self.dtype == jnp.float16 else self.dtype
    if self.feature_map == "exp":
      highest = lambda z: jax.lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
      if self.norm == "after":  # the norm removes a factor per token
        q, k = jnp.exp(q - highest(q)), jnp.exp(k - highest(k))
      else:
        per_head = q.reshape(*q.shape[:2], self.num_heads, self.head_dim)
        q = jnp.exp(per_head - highest(per_head)).reshape(q.shape)
        k = jnp.exp(jnp.clip(k, -_LARGEST_EXPONENT, _LARGEST_EXPONENT))
    elif self.feature_map == "elu":
      # Below, exp(k) and with it the sum of all weights could vanish.
      q, k = (jax.nn.elu(jnp.maximum(z, -_LARGEST_EXPONENT)) + 1 for z in (q, k))
    if self.norm == "after":
      q, k = self._norm(q), self._norm(k)
    return q.astype(dtype), k.astype(dtype)

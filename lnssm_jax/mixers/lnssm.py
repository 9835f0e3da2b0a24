"""The time mixer of the log-normal state-space model (LNSSM)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common.checks import check_choice, check_heads, check_layer, check_norm_eps
from lnssm_jax.mixers.common.initializers import channel_decay, orthogonal, shift_weight
from lnssm_jax.mixers.common.norms import rms_norm_with_floor
from lnssm_jax.mixers.common.projections import Linear
from lnssm_jax.mixers.common.token_shift import interpolated, last_input
from lnssm_jax.ops import LinearAttentionState, linear_attention
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state

SHIFTS = ("qkvg", "kvg")

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
    shift: the streams that see the previous token: "qkvg" (the published code), or "kvg" (the
      paper's text: q reads x_t alone, and there is no mu_q).
    decay_first: eq. 14 prints two forms that differ. True is the state form above, which the
      paper's other equations and its code follow: a token d positions back has weight a^d. With
      False the state is read before it decays, and the weights are 1, 1, a, a^2, ...
    norm_eps: added to the root mean square of queries and keys.
    dtype: of the projections, the features and v. float16 cannot represent the features, which then
      stay float32.
    param_dtype: of the parameters.

  Sums, decays, norms and the state are float32 (float64 for float64 inputs).

  Deviations: the published RMSNorm is x / (rms(x) + 1e-8); here, where rms(x) < 0.01 the divisor is
  0.01 + 1e-8, which bounds the gradient at the zero initialization (see the comment on
  `_RMS_FLOOR`). And k is clipped to +-20 before exp.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive, or `shift` is
      unknown.

  Sources: LNSSM, eqs. 14-15 and 19; token shift, norm, gate and initialization as in its published
  code.
  """

  set_by_model = ("num_heads", "layer", "num_layers")

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    shift: str = "qkvg",
    decay_first: bool = True,
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
    self.mu_q = param(shift_weight(dim, **place)) if shift == "qkvg" else None
    self.mu_k = param(shift_weight(dim, **place))
    self.mu_v = param(shift_weight(dim, **place, offset=0.3))
    self.mu_g = param(shift_weight(dim, **place, power=0.5))
    self.gamma = param(jnp.ones(dim))
    self.w = param(channel_decay(dim, **place))

    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    zeros = nnx.initializers.zeros_init()
    linear = functools.partial(Linear, dim, dim, **options)
    self.q_proj, self.k_proj = linear(kernel_init=zeros), linear(kernel_init=zeros)
    self.v_proj = linear(kernel_init=orthogonal(1.0))
    self.g_proj, self.o_proj = linear(kernel_init=zeros), linear(kernel_init=zeros)

  def _init_state(self, B):
    H, K = self.num_heads, self.head_dim
    recurrent = LinearAttentionState(
      kv=jnp.zeros((B, H, K, K), jnp.float32), key_sum=jnp.zeros((B, H, K), jnp.float32)
    )
    return LNSSMState(jnp.zeros((B, self.dim), jnp.float32), recurrent)

  def _mix(self, x, state, segment_ids):
    B, T, D = x.shape
    previous, recurrent = state if state is not None else (None, None)
    weights = [mu for mu in (self.mu_k, self.mu_v, self.mu_g, self.mu_q) if mu is not None]
    place = {"axis_name": self.sequence_axis, "dtype": self.dtype}
    of_k, of_v, of_g, *of_q = interpolated(x, weights, previous, segment_ids, **place)
    heads = lambda z: z.reshape(B, T, self.num_heads, self.head_dim)

    q = self.q_proj(of_q[0] if of_q else x)
    k, v = self.k_proj(of_k), self.v_proj(of_v)
    gate = jax.nn.sigmoid(self.g_proj(of_g))

    q_features, k_features = self._features(heads(self._norm(q)), heads(self._norm(k)))
    w = self.w[...].reshape(self.num_heads, self.head_dim)
    log_decay = -jnp.exp(wide(w))
    y, recurrent = linear_attention(
      q_features,
      k_features,
      heads(v),
      log_decay=log_decay,
      bonus=None if self.decay_first else jnp.ones_like(log_decay),
      normalize=True,
      axis_name=self.sequence_axis,
      initial_state=recurrent,
      segment_ids=segment_ids,
    )
    last = last_input(x, self.sequence_axis)
    return self.o_proj(gate * y.reshape(B, T, D)), LNSSMState(last, recurrent)

  def _norm(self, z):
    return rms_norm_with_floor(z, self.gamma[...], eps=self.norm_eps, floor=_RMS_FLOOR)

  def _features(self, q, k):
    """exp(q), exp(k) [B, T, H, K]; that of q up to a factor per token, which cancels in y."""
    q = q - jax.lax.stop_gradient(jnp.max(q, axis=-1, keepdims=True))
    k = jnp.clip(k, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    dtype = q.dtype if self.dtype == jnp.float16 else self.dtype
    return jnp.exp(q).astype(dtype), jnp.exp(k).astype(dtype)

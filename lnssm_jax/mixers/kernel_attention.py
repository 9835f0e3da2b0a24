"""Attention by feature maps, without decay: linear attention, normalized attention, Based."""

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_call, check_choice
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.layers import linear, wide
from lnssm_jax.mixers.projections import Projections, feature_dtype
from lnssm_jax.ops import LinearAttentionState
from lnssm_jax.ops.sequence_parallel import linear_attention

FEATURE_MAPS = ("elu", "identity")
ETAS = ("exp", "softplus", "sigmoid")

# elu(k) + 1 = exp(k) for k < 0, and a sum of features may consist of a single one: this keeps it,
# and the square of it that gradients divide by, in the range of float32.
_LOWEST_KEY = -20.0

# exp(W x) leaves the range of float32 for |W x| > 88, and its product with scores before that.
_LARGEST_EXPONENT = 20.0


class LinearAttention(Divisible, Projections):
  r"""Causal linear attention: softmax's exp(q . k) replaced by phi(q) . phi(k).

      q_t = W_q x_t + b_q,  k_t = W_k x_t + b_k,  v_t = W_v x_t + b_v
      S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t)                     for each head
      y_t = S_t^T phi(q_t) / (phi(q_t)^T z_t),      out_t = W_o y_t + b_o

  phi(x) = elu(x) + 1. With feature_map="identity" phi is x, and nothing is divided by.

  Args:
    dim: D, the width; a multiple of `num_heads`. K = V = D / H.
    num_heads: H.
    feature_map: "elu" or "identity".
    use_bias: whether the four projections have a bias.
    num_layers: how many layers the model has, for the initial W_o (see `Projections`).
    dtype: of the projections, the features and v; the state and sums are float32.
    param_dtype: of the parameters.

  The state is that of the scan. Cutting a sequence anywhere and passing it on gives the same result
  as one call.

  With "elu" y_t is a weighted mean of v_1 ... v_t. One deviation: keys are clipped below at -20, so
  that the denominator, to which no epsilon is added, is never 0.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive, or `feature_map` is
      unknown.

  Sources: Katharopoulos et al. 2020, eqs. 4-9 and section 3.2.1; biases as in the published code
  of the dynamical-systems framework (Sieber et al. 2024); without map and normaliser as in SSE
  (eqs. 4-5).
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    feature_map: str = "elu",
    use_bias: bool = True,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.feature_map = check_choice("feature_map", feature_map, FEATURE_MAPS)
    self._build(
      dim,
      num_heads,
      use_bias=use_bias,
      num_layers=num_layers,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )

  def init_state(self, batch_size: int) -> LinearAttentionState:
    """The state before the first token: zeros."""
    return self._empty_memory(batch_size, self.key_dim, normalize=self.feature_map == "elu")

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
    q, k, v = self._queries_keys_values(x)
    normalize = self.feature_map == "elu"
    if normalize:
      # If all of q is negative, exp of it could vanish; a factor per token cancels in y.
      highest = jax.lax.stop_gradient(jnp.minimum(jnp.max(q, axis=-1, keepdims=True), 0))
      q, k = _elu_plus_one(q, highest), _elu_plus_one(jnp.maximum(k, _LOWEST_KEY))
    features = feature_dtype(self.dtype)
    y, state = linear_attention(
      q.astype(features),
      k.astype(features),
      v.astype(self.dtype),
      normalize=normalize,
      axis_name=self.sequence_axis,
      initial_state=state,
      segment_ids=segment_ids,
    )
    return self._output(y), state


def _elu_plus_one(x, log_divisor: jax.Array | float = 0.0):
  """(elu(x) + 1) / exp(log_divisor), where that is not 0 only for x < 0 throughout."""
  return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0) - log_divisor))


class NormalizedAttention(Divisible, Projections):
  r"""Linear attention whose scores are divided by a learned function of the present input.

      q_t = W_q x_t + b_q,  k_t = W_k x_t + b_k,  v_t = W_v x_t + b_v
      S_t = S_{t-1} + k_t v_t^T                                                     for each head
      y_t = S_t^T q_t / eta_t,      eta_t = exp(W_eta x_t + b_eta)          one number for each head
      out_t = W_o y_t + b_o

  No feature map, and no 1 / sqrt(K). eta is a gate on what is read, not a decay. eta="softplus" and
  "sigmoid" put that function in place of exp.

  Args:
    dim: D, the width; a multiple of `num_heads`. V = D / H.
    num_heads: H.
    key_dim: K, the width of a head's queries and keys; None means D / H.
    eta: "exp", "softplus" or "sigmoid".
    use_bias: whether the five projections have a bias.
    num_layers: how many layers the model has, for the initial W_o (see `Projections`).
    dtype: of the projections and of q, k, v; eta, the state and sums are float32.
    param_dtype: of the parameters.

  The state is that of the scan. Cutting a sequence anywhere and passing it on gives the same result
  as one call.

  Deviations: W_eta x + b_eta is clipped to +-20, because eta is not bounded otherwise; and there is
  no dropout of scores.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive, or `eta` is unknown.

  Source: the dynamical-systems framework (Sieber et al. 2024), eq. 21, and its published code.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    key_dim: int | None = None,
    eta: str = "exp",
    use_bias: bool = True,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.eta = check_choice("eta", eta, ETAS)
    self._build(
      dim,
      num_heads,
      key_dim=key_dim,
      use_bias=use_bias,
      num_layers=num_layers,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    init = nnx.initializers.normal(0.02)
    self.eta_proj = linear(dim, num_heads, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    self.eta_bias = nnx.Param(jnp.zeros(num_heads, param_dtype)) if use_bias else None

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
    q, k, v = (z.astype(self.dtype) for z in self._queries_keys_values(x))
    y, state = linear_attention(
      q, k, v, axis_name=self.sequence_axis, initial_state=state, segment_ids=segment_ids
    )
    return self._output(wide(y) / self._eta(x)[..., None]), state

  def _eta(self, x):
    """[B, T, H], positive."""
    z = wide(self.eta_proj(x))
    if self.eta_bias is not None:
      z = z + wide(self.eta_bias[...])
    z = jnp.clip(z, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return {"exp": jnp.exp, "softplus": jax.nn.softplus, "sigmoid": jax.nn.sigmoid}[self.eta](z)


class Based(Divisible, Projections):
  r"""Linear attention whose features are exp's Taylor series up to the square.

      phi(x) = (1, x / f^(1/4), vec(x x^T) / sqrt(2 f))           1 + f + f^2 numbers of x's f
      phi(q) . phi(k) = 1 + s + s^2 / 2  with  s = q . k / sqrt(f),  which is at least 1/2
      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t
      S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t)                     for each head
      y_t = S_t^T phi(q_t) / (phi(q_t)^T z_t),      out_t = W_o y_t

  The published model alternates this layer with others (gated convolutions over 3 steps, or
  attention in a small window); this is the layer itself.

  Args:
    dim: D, the width; a multiple of `num_heads`. V = D / H.
    num_heads: H.
    key_dim: f, the width of a head's queries and keys before the feature map.
    num_layers: how many layers the model has, for the initial W_o (see `Projections`).
    dtype: of the projections, the features and v (features are float32 for float16, whose range
      they exceed); the state and sums are float32.
    param_dtype: of the parameters.

  The state is that of the scan, and has (1 + f + f^2) (V + 1) numbers a head. Cutting a sequence
  anywhere and passing it on gives the same result as one call.

  No epsilon is added to the denominator, which is at least t / 2 (published: 1e-12). That bound
  holds to rounding as long as |q| |k| is well below 1 / sqrt(eps) of the features' dtype.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Source: Based (Arora et al. 2024), section 4.1, and its published code.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    key_dim: int = 16,
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

  def init_state(self, batch_size: int) -> LinearAttentionState:
    """The state before the first token: zeros."""
    features = 1 + self.key_dim + self.key_dim**2
    return self._empty_memory(batch_size, features, normalize=True)

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
    q, k, v = self._queries_keys_values(x)
    dtype = feature_dtype(self.dtype)
    y, state = linear_attention(
      _taylor_features(q).astype(dtype),
      _taylor_features(k).astype(dtype),
      v.astype(self.dtype),
      normalize=True,
      axis_name=self.sequence_axis,
      initial_state=state,
      segment_ids=segment_ids,
    )
    return self._output(y), state


def _taylor_features(x):
  """(1, x / f^(1/4), vec(x x^T) / sqrt(2 f)): [..., f] -> [..., 1 + f + f^2]."""
  f = x.shape[-1]
  squares = (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], f * f)
  parts = (jnp.ones_like(x[..., :1]), x / f**0.25, squares / (2 * f) ** 0.5)
  return jnp.concatenate(parts, axis=-1)

"""Attention by feature maps, without decay: linear attention, normalized attention, Based."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.activations import feature_dtype
from lnssm_jax.mixers.common.checks import check_choice
from lnssm_jax.mixers.common.projections import Linear
from lnssm_jax.mixers.common.qkv import QKVMixer
from lnssm_jax.ops import LinearAttentionState, linear_attention
from lnssm_jax.ops.core.dropout import check_rate, fold, multipliers, row_keys, token_keys
from lnssm_jax.ops.core.precision import product, wide
from lnssm_jax.ops.core.recording import chose_xla
from lnssm_jax.ops.core.segments import segments_of

FEATURE_MAPS = ("elu", "identity")
ETAS = {"exp": jnp.exp, "softplus": jax.nn.softplus, "sigmoid": jax.nn.sigmoid}

# elu(k) + 1 = exp(k) for k < 0, and a sum of features may consist of a single one: this keeps it,
# and the square of it that gradients divide by, in the range of float32.
_LOWEST_KEY = -20.0

# exp(W x) leaves the range of float32 for |W x| > 88, and its product with scores before that.
_LARGEST_EXPONENT = 20.0


class LinearAttention(QKVMixer[LinearAttentionState]):
  r"""Causal linear attention: softmax's exp(q . k) replaced by phi(q) . phi(k).

      q_t = W_q x_t + b_q,  k_t = W_k x_t + b_k,  v_t = W_v x_t + b_v
      S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t)                    per head
      y_t = S_t^T phi(q_t) / (phi(q_t)^T z_t),      out_t = W_o y_t + b_o

  phi(x) = elu(x) + 1. With feature_map="identity" phi is x, and there is no normalizer.

  Args:
    dim: D, the width; a multiple of `num_heads`. V = D / H.
    num_heads: H.
    head_dim: K, the width of a head's queries and keys; None means D / H.
    feature_map: "elu" or "identity".
    use_bias: whether the four projections have a bias.
    attention_dropout: the rate at which weights of v_j, scores over their sum, are dropped in a
      call with `dropout_key`, which takes memory quadratic in T; the published rate is 0.1.
    num_layers: of the model, for the initial W_o (see `QKVMixer`).
    dtype: of the projections, the features and v; state and sums are float32.
    param_dtype: of the parameters.

  With "elu" y_t is a weighted mean of v_1 ... v_t. One deviation: keys are clipped below at -20, so
  that the denominator, to which no epsilon is added, is never 0.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive, `feature_map` is
      unknown, or `attention_dropout` is no rate.

  Sources: Katharopoulos et al. 2020, eqs. 4-9 and section 3.2.1; biases as in the published code
  of the dynamical-systems framework (Sieber et al. 2024); without map and normalizer as in SSE
  (eqs. 4-5).
  """

  name = "linear_attention"
  recurrence_flops = functools.partialmethod(flops.linear_attention, decays=0)

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    head_dim: int | None = None,
    feature_map: str = "elu",
    use_bias: bool = True,
    attention_dropout: float = 0.0,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.feature_map = check_choice("feature_map", feature_map, FEATURE_MAPS)
    self.attention_dropout = check_rate("attention_dropout", attention_dropout)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    sizes = {"num_heads": num_heads, "head_dim": head_dim, "num_layers": num_layers}
    super().__init__(dim, use_bias=use_bias, **sizes, **options)

  def _init_state(self, B):
    return self._empty_recurrent(B, normalize=self.feature_map == "elu")

  def _mapped(self, x):
    """phi(q), phi(k) and v, each [B, T, H, any]."""
    q, k, v = self._queries_keys_values(x)
    if self.feature_map == "elu":
      # If all of q is negative, exp of it could vanish; a factor per token cancels in y.
      highest = jax.lax.stop_gradient(jnp.minimum(jnp.max(q, axis=-1, keepdims=True), 0))
      q, k = _elu_plus_one(q, highest), _elu_plus_one(jnp.maximum(k, _LOWEST_KEY))
    dtype = feature_dtype(self.dtype)
    return q.astype(dtype), k.astype(dtype), v.astype(self.dtype)

  def _mix_dropping(self, x, state, segment_ids, dropout_key):
    if dropout_key is None or not self.attention_dropout:
      return self._mix(x, state, segment_ids)
    y, total = _with_dropout(self, *self._mapped(x), state, segment_ids, dropout_key)
    y = y / total if self.feature_map == "elu" else y
    return self._output(y), self._mix(x, None, segment_ids)[1]

  def _mix(self, x, state, segment_ids):
    q, k, v = self._mapped(x)
    y, state = linear_attention(
      q,
      k,
      v,
      normalize=self.feature_map == "elu",
      scale=1.0,
      **self._place(state, segment_ids),
    )
    return self._output(y), state


def _with_dropout(mixer, q, k, v, state, segment_ids, dropout_key):
  """Sums of v_j by the scores k_j . q_t that are left [B, T, H, V], and of all scores, V = 1."""
  name, (B, T, H, _) = type(mixer).__name__, q.shape
  if state is not None or mixer.sequence_axis is not None:
    given = "a state" if state is not None else f"sequence_axis={mixer.sequence_axis!r}"
    raise NotImplementedError(
      f"{name}: {given} with attention_dropout={mixer.attention_dropout} and "
      "dropout_key: a state has only the sum of earlier tokens, of which none can be dropped; "
      "give whole sequences, or attention_dropout=0."
    )
  chose_xla("linear_attention", f"attention_dropout={mixer.attention_dropout} needs all scores")
  segments = segments_of(name, segment_ids, B, T)
  document = jnp.zeros((B, T), jnp.int32) if segments is None else segments.index
  visible = jnp.tril(document[:, :, None] == document[:, None, :])
  keys = token_keys(row_keys(name, dropout_key, B), T)
  keys = fold(keys[:, None], jnp.arange(H)[:, None])[..., None, :]  # [B, H, T, 1, 2]
  scores = jnp.where(visible[:, None], product("bthk,bshk->bhts", q, k, q.dtype), 0)
  total = scores.sum(-1, keepdims=True).swapaxes(1, 2)
  scores *= multipliers(keys, jnp.arange(T), mixer.attention_dropout, scores.dtype)
  return product("bhts,bshv->bthv", scores, v, mixer.dtype), total


def _elu_plus_one(x, log_divisor: jax.Array | float = 0.0):
  """(elu(x) + 1) / exp(log_divisor), where that is not 0 only for x < 0 throughout."""
  return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0) - log_divisor))


class NormalizedAttention(QKVMixer[LinearAttentionState]):
  r"""Linear attention whose output is divided by a learned function of the current token.

      q_t = W_q x_t + b_q,  k_t = W_k x_t + b_k,  v_t = W_v x_t + b_v
      S_t = S_{t-1} + k_t v_t^T                                                    per head
      y_t = S_t^T q_t / eta_t,      eta_t = exp(W_eta x_t + b_eta)                 per head
      out_t = W_o y_t + b_o

  There is no feature map, and no 1 / sqrt(K). eta gates the output; it is not a decay.
  eta="softplus" and "sigmoid" replace exp by that function.

  Args:
    dim: D, the width; a multiple of `num_heads`. V = D / H.
    num_heads: H.
    head_dim: K, the width of a head's queries and keys; None means D / H.
    eta: "exp", "softplus" or "sigmoid".
    use_bias: whether the five projections have a bias.
    attention_dropout: the rate at which scores k_j . q_t / eta_t are dropped in a call with
      `dropout_key`. Such a call computes all scores [B, H, T, T], for a state has only their sum:
      its cost is quadratic in T, and it takes neither a state nor a sharded sequence.
    num_layers: of the model, for the initial W_o (see `QKVMixer`).
    dtype: of the projections and of q, k, v; eta, state and sums are float32.
    param_dtype: of the parameters.

  Deviation: W_eta x + b_eta is clipped to +-20, because eta is not bounded otherwise.

  Raises:
    NotImplementedError: a call with dropout has a state or a sharded sequence.
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive, `eta` is unknown, or
      `attention_dropout` is no rate.

  Source: the dynamical-systems framework (Sieber et al. 2024), eq. 21, and its published code.
  """

  name = "normalized_attention"
  recurrence_flops = functools.partialmethod(flops.linear_attention, decays=0)

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    head_dim: int | None = None,
    eta: str = "exp",
    use_bias: bool = True,
    attention_dropout: float = 0.0,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.eta = check_choice("eta", eta, ETAS)
    self.attention_dropout = check_rate("attention_dropout", attention_dropout)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    super().__init__(
      dim,
      num_heads=num_heads,
      head_dim=head_dim,
      use_bias=use_bias,
      num_layers=num_layers,
      **options,
    )
    self.eta_proj = Linear(
      dim,
      num_heads,
      kernel_init=nnx.initializers.normal(0.02),
      bias_init="zeros" if use_bias else None,
      **options,
    )

  def _init_state(self, B):
    return self._empty_recurrent(B)

  def _mix(self, x, state, segment_ids):
    q, k, v = (z.astype(self.dtype) for z in self._queries_keys_values(x))
    y, state = linear_attention(q, k, v, scale=1.0, **self._place(state, segment_ids))
    return self._output(wide(y) / self._eta(x)[..., None]), state

  def _mix_dropping(self, x, state, segment_ids, dropout_key):
    if dropout_key is None or not self.attention_dropout:
      return self._mix(x, state, segment_ids)
    q, k, v = (z.astype(self.dtype) for z in self._queries_keys_values(x))
    y, _ = _with_dropout(self, q, k, v, state, segment_ids, dropout_key)
    # The state after the tokens, of which a training step uses nothing, is that without dropout.
    return self._output(y / self._eta(x)[..., None]), self._mix(x, None, segment_ids)[1]

  def _eta(self, x):
    """[B, T, H], positive."""
    z = jnp.clip(wide(self.eta_proj(x)), -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return ETAS[self.eta](z)


class Based(QKVMixer[LinearAttentionState]):
  r"""Linear attention whose features are exp's Taylor series up to the square.

      phi(x) = (1, x / K^(1/4), vec(x x^T) / sqrt(2 K))           1 + K + K^2 features
      phi(q) . phi(k) = 1 + s + s^2 / 2  with  s = q . k / sqrt(K),  which is at least 1/2
      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t
      S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t)                    per head
      y_t = S_t^T phi(q_t) / (phi(q_t)^T z_t),      out_t = W_o y_t

  The published model alternates this layer with others (gated convolutions over 3 tokens, or
  attention in a small window); this is the layer itself.

  Args:
    dim: D, the width; a multiple of `num_heads`. V = D / H.
    num_heads: H.
    head_dim: K, the width of a head's queries and keys before the feature map.
    num_layers: of the model, for the initial W_o (see `QKVMixer`).
    dtype: of the projections, the features and v (features are float32 for float16, whose range
      they exceed); state and sums are float32.
    param_dtype: of the parameters.

  The state has (1 + K + K^2) (V + 1) numbers per head.

  No epsilon is added to the denominator, which is at least t / 2 (published: 1e-12). That bound
  holds to rounding as long as |q| |k| is well below 1 / sqrt(eps) of the features' dtype.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Source: Based (Arora et al. 2024), section 4.1, and its published code.
  """

  name = "based"
  recurrence_flops = functools.partialmethod(flops.linear_attention, decays=0)

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    head_dim: int = 16,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    super().__init__(dim, num_heads=num_heads, head_dim=head_dim, num_layers=num_layers, **options)

  def _init_state(self, B):
    return self._empty_recurrent(B, 1 + self.key_dim + self.key_dim**2, normalize=True)

  def _mix(self, x, state, segment_ids):
    q, k, v = self._queries_keys_values(x)
    dtype = feature_dtype(self.dtype)
    y, state = linear_attention(
      _taylor_features(q).astype(dtype),
      _taylor_features(k).astype(dtype),
      v.astype(self.dtype),
      normalize=True,
      **self._place(state, segment_ids),
    )
    return self._output(y), state


def _taylor_features(x):
  """(1, x / K^(1/4), vec(x x^T) / sqrt(2 K)): [..., K] -> [..., 1 + K + K^2]."""
  K = x.shape[-1]
  squares = (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], K * K)
  parts = (jnp.ones_like(x[..., :1]), x / K**0.25, squares / (2 * K) ** 0.5)
  return jnp.concatenate(parts, axis=-1)

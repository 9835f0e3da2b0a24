"""Kimi Delta Attention and Gated DeltaNet-2: the delta rule with a decay per key channel."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.mixers.common.initializers import decay_rate, step_size_bias
from lnssm_jax.mixers.common.projections import Linear, split_heads
from lnssm_jax.mixers.delta_net import DeltaBlock, DeltaNetState, value_widths
from lnssm_jax.ops import delta_rule
from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.ops.core.precision import wide


class _ChannelDecays(DeltaBlock):
  """Decays per key channel and an output gate, each from two matrices of low rank."""

  recomputes = True
  recurrence_flops = functools.partialmethod(flops.delta_rule, decays=1)

  def _build_all(
    self, dim, num_heads, widths, *, decay_heads, gate_rank, use_beta, allow_neg_eigval,
    conv_size, conv_bias, norm_eps, options, gate_bias=True, full_gates=False,
  ):  # fmt: skip
    init = nnx.initializers.normal(0.02)
    self._build(
      dim,
      num_heads,
      widths,
      conv_size=conv_size,
      conv_bias=conv_bias,
      allow_neg_eigval=allow_neg_eigval,
      use_beta=use_beta,
      norm_eps=norm_eps,
      kernel_init=init,
      options=options,
    )
    values, key_dim, value_dim = widths
    rank = value_dim if gate_rank is None else check_positive("gate_rank", gate_rank)
    linear = functools.partial(Linear, kernel_init=init, **options)
    rank = dim if full_gates else rank
    self.decay_down_proj = None if full_gates else linear(dim, rank)
    self.decay_up_proj = linear(rank, decay_heads * key_dim, bias_init=step_size_bias)
    self.gate_down_proj = None if full_gates else linear(dim, rank)
    self.gate_up_proj = linear(rank, values * value_dim, bias_init="zeros" if gate_bias else None)
    rate = decay_rate(options["rngs"].params(), (decay_heads,), options["param_dtype"], lowest=1.0)
    self.log_rate = nnx.Param(rate)

  def _decay_logits(self, x):
    """(f + b [B, T, heads, K], exp(log_rate) [heads, 1]) in float32 at least."""
    rate = jnp.exp(wide(self.log_rate[...]))[:, None]
    f = self.decay_up_proj(x if self.decay_down_proj is None else self.decay_down_proj(x))
    return split_heads(f, rate.shape[0]), rate

  def _finish(self, x, y):
    inner = x if self.gate_down_proj is None else self.gate_down_proj(x)
    return self._sigmoid_gated(y, self.gate_up_proj(inner))


class KDA(_ChannelDecays):
  r"""Kimi Delta Attention: the gated delta rule with a decay for each key channel.

      q_t = unit(silu(conv(W_q x))_t),  k_t = unit(silu(conv(W_k x))_t),  v_t = silu(conv(W_v x))_t
      f_t = W_2 W_1 x_t + b,   log a_t = -exp(log_rate) softplus(f_t)           per head and channel
      S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T,  beta_t = sigmoid(W_b x_t)
      y_t = K^(-1/2) S_t^T q_t,   out_t = W_o (sigmoid(W_4 W_3 x_t + c) * RMSNorm(y_t))

  with unit(z) and the norm of `DeltaNet`. Initially exp(log_rate), one number per head, is uniform
  between 1 and 16, softplus(b) log-uniform between 0.001 and 0.1, and kernels are normal with a
  standard deviation of 0.02. The defaults are those of fla's layer `KimiDeltaAttention`, but for
  head_dim, which is 128 there; its models have norm_eps=1e-6.

  Args:
    dim: D, the width of input and output.
    num_heads: H, of queries and keys.
    num_value_heads: a multiple of H; decays, beta and the state belong to these. None means H.
    head_dim: K; None means D / H.
    expand_v: V / K.
    lower_bound: a negative number, of log a: log a_t = lower_bound sigmoid(exp(log_rate) f_t), with
      log_rate 0 at first (fla's `lower_bound` with `safe_gate`). None is the formula above.
    gate_rank: the width of W_1 x and of W_3 x; None means V, as in fla.
    gate_bias: whether there is a c; Kimi-Linear-48B has none.
    full_gates: leaves W_1 and W_3 out: f_t = W_2 x_t + b and sigmoid(W_4 x_t + c) (Ling 3.0).
    conv_size: W, the tokens that a convolution sees; None leaves the three convolutions out.
    conv_bias: whether the convolutions have a bias.
    allow_neg_eigval: beta_t = 2 sigmoid(W_b x_t), as in `DeltaNet`.
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; decays, beta, norms, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: as `GatedDeltaNet`, or `lower_bound` is not a negative, finite number.

  Source: Kimi Linear (Kimi Team 2025, arXiv 2510.26692), eqs. 1 and 10; initial values, and all
  that the paper leaves open, as in fla's layer and models.
  """

  name = "kda"

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    num_value_heads: int | None = None,
    head_dim: int | None = None,
    expand_v: float = 1.0,
    lower_bound: float | None = None,
    gate_rank: int | None = None,
    gate_bias: bool = True,
    full_gates: bool = False,
    conv_size: int | None = 4,
    conv_bias: bool = False,
    allow_neg_eigval: bool = False,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    if lower_bound is not None and not (is_number(lower_bound) and -math.inf < lower_bound < 0):
      raise ValueError(
        f"lower_bound={lower_bound!r} must be a finite negative number, such as -5.0, or None: it "
        "is the least logarithm of a decay."
      )
    self.lower_bound = lower_bound
    widths = value_widths(dim, num_heads, num_value_heads, head_dim, expand_v)
    self._build_all(
      dim,
      num_heads,
      widths,
      decay_heads=widths[0],
      gate_rank=gate_rank,
      gate_bias=gate_bias,
      full_gates=full_gates,
      use_beta=True,
      allow_neg_eigval=allow_neg_eigval,
      conv_size=conv_size,
      conv_bias=conv_bias,
      norm_eps=norm_eps,
      options={"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs},
    )
    if lower_bound is not None:
      self.log_rate[...] = jnp.zeros_like(self.log_rate[...])

  def _mix(self, x, state, segment_ids):
    q, k, v, convs = self._streams(x, state, segment_ids)
    f, rate = self._decay_logits(x)
    if self.lower_bound is None:
      log_decay = -rate * jax.nn.softplus(f)
    else:
      log_decay = self.lower_bound * jax.nn.sigmoid(rate * f)
    y, recurrent = self._recur(x, q, k, v, state, segment_ids, log_decay=log_decay)
    return self._finish(x, y), DeltaNetState(*convs, recurrent)


class GatedDeltaNet2(_ChannelDecays):
  r"""Gated DeltaNet-2: Kimi Delta Attention that erases and writes with gates of their own.

      b_t = sigmoid(W_b x_t) [K],   w_t = sigmoid(W_w x_t) [V]                            per head
      S_t = (I - k_t (b_t * k_t)^T) diag(a_t) S_{t-1} + k_t (w_t * v_t)^T

  with q, k, v, a, the output and the initial values of `KDA`; b = w = beta makes the two equal. The
  decays and b belong to the heads of keys, w to those of values. The defaults are those of fla's
  layer `GatedDeltaNet2`, but for head_dim, which is 128 there.

  Args:
    dim: D, the width of input and output.
    num_heads: H, of queries, keys and decays.
    num_value_heads: a multiple of H; the state belongs to these. None means H.
    head_dim: K; None means D / H.
    expand_v: V / K.
    gate_rank: the width of W_1 x and of W_3 x; None means V, as in fla.
    conv_size: W, the tokens that a convolution sees; None leaves the three convolutions out.
    conv_bias: whether the convolutions have a bias.
    allow_neg_eigval: b_t = 2 sigmoid(W_b x_t).
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; decays, gates, norms, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: as `GatedDeltaNet`.

  Source: Gated DeltaNet-2 (arXiv 2605.22791); initial values, and all that the paper leaves open,
  as in fla's layer, kernels as in fla's models.
  """

  name = "gated_delta_net2"

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    num_value_heads: int | None = None,
    head_dim: int | None = None,
    expand_v: float = 1.0,
    gate_rank: int | None = None,
    conv_size: int | None = 4,
    conv_bias: bool = False,
    allow_neg_eigval: bool = False,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    widths = value_widths(dim, num_heads, num_value_heads, head_dim, expand_v)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self._build_all(
      dim,
      num_heads,
      widths,
      decay_heads=num_heads,
      gate_rank=gate_rank,
      use_beta=False,
      allow_neg_eigval=allow_neg_eigval,
      conv_size=conv_size,
      conv_bias=conv_bias,
      norm_eps=norm_eps,
      options=options,
    )
    values, key_dim, value_dim = widths
    linear = functools.partial(Linear, kernel_init=nnx.initializers.normal(0.02), **options)
    self.erase_proj = linear(dim, num_heads * key_dim)
    self.write_proj = linear(dim, values * value_dim)

  def _mix(self, x, state, segment_ids):
    q, k, v, convs = self._streams(x, state, segment_ids)
    k = self._queries_or_keys(k)
    f, rate = self._decay_logits(x)
    gate = lambda layer, z: jax.nn.sigmoid(wide(layer(x))).reshape(z.shape) * wide(z)
    y, recurrent = delta_rule(
      self._queries_or_keys(q),
      k,
      gate(self.write_proj, v).astype(self.dtype),
      jnp.ones(v.shape[:3], wide(x).dtype),
      log_decay=-rate * jax.nn.softplus(f),
      erase_key=(self.largest_beta * gate(self.erase_proj, k)).astype(self.dtype),
      **self._place(state, segment_ids),
    )
    return self._finish(x, y), DeltaNetState(*convs, recurrent)

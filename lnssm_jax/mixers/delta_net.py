"""DeltaNet and Gated DeltaNet: associative memories that correct the value stored for a key."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import (
  check_choice,
  check_head_widths,
  check_heads,
  check_positive,
  check_width,
)
from lnssm_jax.mixers.common.initializers import decay_rate, step_size_bias, xavier_uniform
from lnssm_jax.mixers.common.norms import RMSNorm, unit_norm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.mixers.common.short_convolution import ShortConvolution
from lnssm_jax.ops import ConvState, DeltaRuleState, delta_rule
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state

QK_NORMS = ("l2", "sum")
QK_ACTIVATIONS = {
  "silu": jax.nn.silu,
  "relu": jax.nn.relu,
  "elu": lambda x: jax.nn.elu(x) + 1,
  "identity": lambda x: x,
}


@register_state
class DeltaNetState(NamedTuple):
  """Recurrent state of the delta rule's mixers, float32."""

  q_conv: ConvState  # inputs [B, W - 1, H K], empty without convolutions
  k_conv: ConvState  # inputs [B, W - 1, H K]
  v_conv: ConvState  # inputs [B, W - 1, H' V], H' value heads
  recurrent: DeltaRuleState  # kv [B, H', K, V]


def value_widths(
  dim: int, num_heads: int, num_value_heads: int | None, head_dim: int | None, expand_v: float
) -> tuple[int, int, int]:
  """(Value heads, K, V) of the options that the mixers with grouped value heads share.

  Raises:
    ValueError: a size is not positive, `num_value_heads` is not a multiple of `num_heads`, values
      do not have a whole width, or, without `head_dim`, `dim` is not a multiple of `num_heads`.
  """
  check_positive("dim", dim)
  check_positive("num_heads", num_heads)
  values = num_heads if num_value_heads is None else num_value_heads
  if check_positive("num_value_heads", values) % num_heads:
    raise ValueError(
      f"num_value_heads={num_value_heads} is not a multiple of num_heads={num_heads}: each query "
      "and key head serves equally many value heads."
    )
  key_dim = check_heads(dim, num_heads) if head_dim is None else head_dim
  value_dim = check_width("expand_v", expand_v, "head_dim", check_positive("head_dim", key_dim))
  return values, key_dim, value_dim


class DeltaBlock(Mixer[DeltaNetState]):
  """Projections, convolutions, unit queries and keys, the rate beta and the norm of the output.

  With `steps`, a token has so many keys, values and rates.
  """

  starts_as_model = True
  set_by_model = ("num_heads",)
  a_proj: Any  # of mixers with a decay per head, as is the next
  log_rate: Any

  def _build(
    self,
    dim,
    num_heads,
    widths,  # as of `value_widths`
    *,
    conv_size,
    conv_bias,
    qk_activation="silu",
    qk_norm="l2",
    allow_neg_eigval=False,
    use_beta=True,
    steps=1,
    norm_eps,
    kernel_init=None,
    options,
  ):
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(options["dtype"])
    num_value_heads, key_dim, value_dim = widths
    self.num_value_heads, self.key_dim, self.value_dim = widths
    self.qk_activation, self.qk_norm = qk_activation, qk_norm
    self.largest_beta = 2.0 if allow_neg_eigval else 1.0
    keys, values = num_heads * key_dim, num_value_heads * value_dim
    kernel_init = kernel_init or xavier_uniform(2**-2.5)
    linear = functools.partial(Linear, kernel_init=kernel_init, **options)
    self.q_proj, self.k_proj = linear(dim, keys), linear(dim, steps * keys)
    self.v_proj = linear(dim, steps * values)
    self.b_proj = linear(dim, steps * num_value_heads) if use_beta else None
    conv = functools.partial(ShortConvolution, use_bias=conv_bias, **options)
    qk_conv = functools.partial(conv, activation="silu" if qk_activation == "silu" else None)
    self.q_conv, self.k_conv = qk_conv(keys, conv_size), qk_conv(steps * keys, conv_size)
    self.v_conv = conv(steps * values, conv_size, activation="silu")
    self.norm = RMSNorm(value_dim, eps=norm_eps, param_dtype=options["param_dtype"])
    self.o_proj = linear(values, dim)

  def _build_decay_and_gate(self, use_gate, kernel_init, options):
    values, rngs = self.num_value_heads, options["rngs"]
    linear = functools.partial(Linear, self.dim, kernel_init=kernel_init, **options)
    self.a_proj = linear(values)
    self.g_proj = linear(values * self.value_dim) if use_gate else None
    self.log_rate = nnx.Param(decay_rate(rngs.params(), (values,), options["param_dtype"]))
    self.a_proj.draw_bias(step_size_bias, rngs)

  def _init_state(self, B):
    kv = jnp.zeros((B, self.num_value_heads, self.key_dim, self.value_dim), jnp.float32)
    q_conv, k_conv, v_conv = (c.init_state(B) for c in (self.q_conv, self.k_conv, self.v_conv))
    return DeltaNetState(q_conv, k_conv, v_conv, DeltaRuleState(kv))

  def _queries_or_keys(self, z: jax.Array) -> jax.Array:
    """[B, T, H, K] after convolution and silu -> normalized, in `dtype`."""
    if self.qk_activation != "silu":
      z = QK_ACTIVATIONS[self.qk_activation](wide(z))
    if self.qk_norm == "l2":
      return unit_norm(z, dtype=self.dtype)
    return (wide(z) / jnp.sum(wide(z), axis=-1, keepdims=True)).astype(self.dtype)

  def _streams(self, x, state, segment_ids):
    """Queries, keys [B, T, H, K] and values [B, T, H', V]; the states of their convolutions."""
    q_conv, k_conv, v_conv = (None,) * 3 if state is None else state[:3]

    def stream(z, conv, conv_state, width):
      z, conv_state = conv(z, conv_state, segment_ids)
      return split_heads(z, z.shape[-1] // width), conv_state

    q, q_conv = stream(self.q_proj(x), self.q_conv, q_conv, self.key_dim)
    k, k_conv = stream(self.k_proj(x), self.k_conv, k_conv, self.key_dim)
    v, v_conv = stream(self.v_proj(x), self.v_conv, v_conv, self.value_dim)
    return q, k, v, (q_conv, k_conv, v_conv)

  def _rate(self, x):
    """beta [B, T, H']."""
    if self.b_proj is None:
      return jnp.full((*x.shape[:2], self.num_value_heads), self.largest_beta, wide(x).dtype)
    beta = jax.nn.sigmoid(wide(self.b_proj(x)))
    return beta if self.largest_beta == 1 else self.largest_beta * beta

  def _place(self, state, segment_ids):
    return super()._place(None if state is None else state.recurrent, segment_ids)

  def _mix_gated(self, x, state, segment_ids, *, log_decay, gate):
    """(W_o (RMSNorm(y) * silu(gate)), the state after the last token)."""
    q, k, v, convs = self._streams(x, state, segment_ids)
    y, recurrent = self._recur(x, q, k, v, state, segment_ids, log_decay=log_decay)
    return self._silu_gated(y, gate), DeltaNetState(*convs, recurrent)

  def _recur(self, x, q, k, v, state, segment_ids, **more):
    """The delta rule of the streams; `more` of its arguments."""
    return delta_rule(
      self._queries_or_keys(q),
      self._queries_or_keys(k),
      v.astype(self.dtype),
      self._rate(x),
      **more,
      **self._place(state, segment_ids),
    )

  def _decay_of_heads(self, x):
    """log a [B, T, H']."""
    rate = jnp.exp(wide(self.log_rate[...]))
    return -rate * jax.nn.softplus(self.a_proj(x))

  def _silu_gated(self, y, gate):
    """W_o (RMSNorm(y) * silu(gate)) of y [B, T, H', V]; a gate of None is none."""
    gate = None if gate is None else split_heads(gate, self.num_value_heads)
    return self.o_proj(merge_heads(self.norm(y, gate=gate, dtype=self.dtype)))

  def _sigmoid_gated(self, y, gate):
    """W_o (RMSNorm(y) * sigmoid(gate)) of y [B, T, H', V]."""
    gate = jax.nn.sigmoid(wide(split_heads(gate, self.num_value_heads)))
    return self.o_proj(merge_heads((self.norm(y) * gate).astype(self.dtype)))


class DeltaNet(DeltaBlock):
  r"""The delta rule with unit keys: each token moves the value stored for its key towards its own.

      q_t = unit(silu(conv(W_q x))_t),  k_t = unit(silu(conv(W_k x))_t),  v_t = silu(conv(W_v x))_t
      S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    beta_t = sigmoid(W_b x_t)
      y_t = K^(-1/2) S_t^T q_t,      out_t = W_o RMSNorm(y_t)                      per head

  unit(z) = z / sqrt(sum(z^2) + 1e-6) per head. The norm is over the V channels of each head, with
  one scale [V] for all heads. The defaults are those of fla's layer, `DeltaNet`, and every option
  is one of its options; its models have norm_eps=1e-6.

  Args:
    dim: D, the width of input and output.
    num_heads: H.
    expand_k, expand_v: H K / D and H V / D.
    conv_size: W, the tokens that a convolution sees; None leaves the three convolutions out
      ("use_short_conv" in fla).
    conv_bias: whether the convolutions have a bias.
    qk_activation: of queries and keys, "silu", "relu", "elu" (elu + 1) or "identity".
    qk_norm: "l2" for unit(z), or "sum" for z / sum(z), as Schlag et al. 2021, eq. 23, have it. That
      needs positive numbers, qk_activation="elu".
    allow_neg_eigval: beta_t = 2 sigmoid(W_b x_t), with which I - beta k k^T may reflect
      (Grazzi et al. 2025).
    use_beta: without, beta_t = 1 (2 with `allow_neg_eigval`).
    use_gate: out_t = W_o (silu(W_g x_t) * RMSNorm(y_t)).
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; beta, norms, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, keys or values do not divide evenly among the heads, an
      option is unknown, or qk_norm="sum" has features that are not positive.

  Source: DeltaNet (Yang et al. 2024), section 3.3; all kernels start Xavier-uniform with gain
  2^(-5/2), as those of GLA.
  """

  name = "delta_net"
  recurrence_flops = functools.partialmethod(flops.delta_rule, decays=0)

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    expand_k: float = 1.0,
    expand_v: float = 1.0,
    conv_size: int | None = 4,
    conv_bias: bool = False,
    qk_activation: str = "silu",
    qk_norm: str = "l2",
    allow_neg_eigval: bool = False,
    use_beta: bool = True,
    use_gate: bool = False,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_heads(dim, num_heads)
    key_dim, value_dim = check_head_widths(dim, num_heads, expand_k, expand_v)
    check_choice("qk_activation", qk_activation, QK_ACTIVATIONS)
    if check_choice("qk_norm", qk_norm, QK_NORMS) == "sum" and qk_activation != "elu":
      raise ValueError(
        f"qk_norm='sum' divides by the sum of the features, which may be 0 with qk_activation="
        f"{qk_activation!r}; use qk_activation='elu', or qk_norm='l2'."
      )
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self._build(
      dim,
      num_heads,
      (num_heads, key_dim, value_dim),
      conv_size=conv_size,
      conv_bias=conv_bias,
      qk_activation=qk_activation,
      qk_norm=qk_norm,
      allow_neg_eigval=allow_neg_eigval,
      use_beta=use_beta,
      norm_eps=norm_eps,
      options=options,
    )
    gate_init = xavier_uniform(2**-2.5)
    values = num_heads * value_dim
    self.g_proj = Linear(dim, values, kernel_init=gate_init, **options) if use_gate else None

  def _mix(self, x, state, segment_ids):
    gate = None if self.g_proj is None else self.g_proj(x)
    return self._mix_gated(x, state, segment_ids, log_decay=None, gate=gate)


class GatedDeltaNet(DeltaBlock):
  r"""The delta rule of `DeltaNet` with a decay per token and head, wider values and an output gate.

      a_t = exp(-exp(log_rate) softplus(W_a x_t + b_a))                            per head
      S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
      y_t = K^(-1/2) S_t^T q_t,      out_t = W_o (silu(W_g x_t) * RMSNorm(y_t))

  with q, k, v, beta and the norm of `DeltaNet`. Initially the rate exp(log_rate) is uniform between
  0 and 16, and softplus(b_a) log-uniform between 0.001 and 0.1. The defaults are those of fla's
  layer `GatedDeltaNet`, whose models have norm_eps=1e-6; Qwen3-Next has num_heads=16,
  num_value_heads=32, expand_v=1 and norm_eps=1e-6; the models of the SSE paper conv_size=None.

  Args:
    dim: D, the width of input and output.
    num_heads: H, of queries and keys.
    num_value_heads: a multiple of H; a, beta and the state belong to these. None means H.
    head_dim: K; None means D / H.
    expand_v: V / K.
    conv_size: W, the tokens that a convolution sees; None leaves the three convolutions out: q, k
      and v are then silu of the projections.
    conv_bias: whether the convolutions have a bias.
    allow_neg_eigval: beta_t = 2 sigmoid(W_b x_t), as in `DeltaNet`.
    use_gate: whether there is the output gate.
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; decays, beta, norms, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, `num_value_heads` is not a multiple of `num_heads`, values
      do not have a whole width, or, without `head_dim`, `dim` is not a multiple of `num_heads`.

  Source: Gated DeltaNet (Yang et al. 2025), section 3.4; initialization of the decay as in Mamba-2;
  all kernels start Xavier-uniform with gain 2^(-5/2), as those of GLA.
  """

  name = "gated_delta_net"
  recurrence_flops = functools.partialmethod(flops.delta_rule, decays=1)

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    num_value_heads: int | None = None,
    head_dim: int | None = None,
    expand_v: float = 2,
    conv_size: int | None = 4,
    conv_bias: bool = False,
    allow_neg_eigval: bool = False,
    use_gate: bool = True,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    widths = value_widths(dim, num_heads, num_value_heads, head_dim, expand_v)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self._build(
      dim,
      num_heads,
      widths,
      conv_size=conv_size,
      conv_bias=conv_bias,
      allow_neg_eigval=allow_neg_eigval,
      norm_eps=norm_eps,
      options=options,
    )
    self._build_decay_and_gate(use_gate, xavier_uniform(2**-2.5), options)

  def _mix(self, x, state, segment_ids):
    log_decay = self._decay_of_heads(x)
    gate = None if self.g_proj is None else self.g_proj(x)
    return self._mix_gated(x, state, segment_ids, log_decay=log_decay, gate=gate)

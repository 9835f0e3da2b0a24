"""Linear attention with decay: gated linear attention (GLA) and retention (RetNet)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer, SelectingMixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.activations import log_gate
from lnssm_jax.mixers.common.checks import (
  check_choice,
  check_groups,
  check_head_widths,
  check_heads,
  check_normalizer,
  check_positive,
)
from lnssm_jax.mixers.common.initializers import xavier_uniform
from lnssm_jax.mixers.common.norms import NORMS, RMSNorm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.mixers.common.routing import RowSparsity
from lnssm_jax.mixers.common.short_convolution import ShortConvolution, convolve_each
from lnssm_jax.ops import ConvState, LinearAttentionState, linear_attention, rotary_embedding
from lnssm_jax.ops.core.halo import step_positions
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state

FREQUENCIES = ("rope", "torchscale")
FEATURE_MAPS = {
  "identity": lambda x: x,
  "silu": lambda x: jax.nn.silu(wide(x)).astype(x.dtype),
  "relu": jax.nn.relu,
}


@register_state
class GLAState(NamedTuple):
  """Recurrent state of `GLA` with convolutions, float32."""

  recurrent: LinearAttentionState  # kv [B, G, K, V]
  convs: tuple[ConvState, ...]  # inputs [B, W - 1, any] of those of q, k, v


class GLA(SelectingMixer[LinearAttentionState | GLAState]):
  r"""Gated linear attention: each key channel decays by a data-dependent factor.

      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t,      a_t = sigmoid(W_2 W_1 x_t + b)^(1 / tau)
      S_t = diag(a_t) S_{t-1} + k_t v_t^T,      y_t = K^(-1/2) S_t^T q_t           per head
      out_t = W_o (silu(W_g x_t) * RMSNorm(y_t))

  The norm is over the V channels of each head, with one scale [V] for all heads. There is no
  normalizer. The defaults are those of fla's layer, `GatedLinearAttention`, but for the biases of
  its convolutions and other activations so are the options; its models have norm_eps=1e-6. The GLA
  of Longhorn's experiments has H = D / 64,
  norm="layer", norm_scale=False and gate_bias=True.

  Args:
    dim: D, the width of input and output.
    num_heads: H.
    num_kv_heads: G, the number of heads of keys, values, decays and states, a divisor of H: each
      serves equally many query heads. None means H.
    expand_k, expand_v: H K / D and H V / D.
    gate_rank: the width of W_1 x.
    gate_logit_normalizer: tau; larger values move the decays towards 1.
    clamp_min: the smallest log(a_t), below 0; None for any.
    feature_map: of queries and keys, "silu", "relu" or "identity".
    conv_size: W, the tokens seen by the convolutions of q, k and v, each followed by silu; None for
      no convolutions.
    use_gate: whether the output is multiplied by silu(W_g x_t).
    gate_bias: whether W_g has a bias.
    norm: "rms" or "layer", which also subtracts the mean.
    norm_scale: whether the norm has a scale (with "layer", also a bias).
    selected_rows: k, the rows of the state that a token decays and writes, those of its largest
      keys; None for all. The others keep decay 1. `RowSparsity` has the source.
    balance: coefficient of the balance loss of `selected_rows`, which `with_aux` returns.
    mass: in that loss, the mean weight of the "selected" rows, or of all ("full").
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  With `selected_rows` the keys are softmax(W_k x_t) over the selected rows, 0 in the others.

  The state is a `LinearAttentionState`; with convolutions, a `GLAState`.

  Raises:
    ValueError: a size is not positive, keys or values do not divide evenly among the heads,
      `clamp_min` is not negative, or a name is unknown.

  Source: GLA (Yang et al. 2024), section 4.4; all kernels start Xavier-uniform with gain 2^(-5/2),
  and b at zero, as in its published code.
  """

  name = "gla"
  starts_as_model = True
  set_by_model = ("num_heads",)
  recurrence_flops = flops.linear_attention

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    expand_k: float = 0.5,
    expand_v: float = 1.0,
    gate_rank: int = 16,
    gate_logit_normalizer: float = 16.0,
    clamp_min: float | None = None,
    feature_map: str = "identity",
    conv_size: int | None = None,
    use_gate: bool = True,
    gate_bias: bool = False,
    norm: str = "rms",
    norm_scale: bool = True,
    selected_rows: int | None = None,
    balance: float = 0.01,
    mass: str = "selected",
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.key_dim, self.value_dim = check_head_widths(dim, num_heads, expand_k, expand_v)
    self.num_kv_heads = G = check_groups("num_kv_heads", num_kv_heads, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    check_positive("gate_rank", gate_rank)
    self.gate_logit_normalizer = check_normalizer(gate_logit_normalizer)
    self.clamp_min = clamp_min
    if clamp_min is not None and not clamp_min < 0:
      raise ValueError(f"clamp_min={clamp_min} bounds the logarithm of decays and must be below 0.")
    self.feature_map = check_choice("feature_map", feature_map, FEATURE_MAPS)
    self.rows = RowSparsity.checked(selected_rows, "the key width", self.key_dim, balance, mass)
    keys, values = num_heads * self.key_dim, num_heads * self.value_dim
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    linear = functools.partial(Linear, kernel_init=xavier_uniform(2**-2.5), **options)
    self.q_proj, self.k_proj = linear(dim, keys), linear(dim, G * self.key_dim)
    self.v_proj = linear(dim, G * self.value_dim)
    gate = functools.partial(linear, dim, values, bias_init="zeros" if gate_bias else None)
    self.g_proj = gate() if use_gate else None
    self.decay_down_proj = linear(dim, gate_rank)
    self.decay_up_proj = linear(gate_rank, G * self.key_dim, bias_init="zeros")
    norm_class = NORMS[check_choice("norm", norm, NORMS)]
    self.norm = norm_class(
      self.value_dim, eps=norm_eps, use_scale=norm_scale, param_dtype=param_dtype
    )
    self.o_proj = linear(values, dim)
    conv = functools.partial(ShortConvolution, use_bias=False, activation="silu", **options)
    widths = (keys, G * self.key_dim, G * self.value_dim)
    convs = [None if conv_size is None else conv(width, conv_size) for width in widths]
    self.q_conv, self.k_conv, self.v_conv = convs

  def _init_state(self, B):
    shape = (B, self.num_kv_heads, self.key_dim, self.value_dim)
    recurrent = LinearAttentionState(jnp.zeros(shape, jnp.float32), None)
    if not (convs := self._convs):
      return recurrent
    return GLAState(recurrent, tuple(conv.init_state(B) for conv in convs))

  @property
  def _convs(self) -> tuple[ShortConvolution, ...]:
    convs = (self.q_conv, self.k_conv, self.v_conv)
    return tuple(conv for conv in convs if conv is not None)

  def _run(self, x, state, segment_ids):
    """(out, state, (weights, whether selected) of the rows [B, T, heads, rows], or None)."""
    recurrent, convs = state if isinstance(state, GLAState) else (state, ())
    streams = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
    (q, k, v), convs = convolve_each(self._convs, streams, convs, segment_ids)
    G = self.num_kv_heads
    features = FEATURE_MAPS[self.feature_map]
    log_decay = log_gate(self.decay_up_proj(self.decay_down_proj(x)), self.gate_logit_normalizer)
    if self.clamp_min is not None:
      log_decay = jnp.maximum(log_decay, self.clamp_min)
    k, log_decay, selection = features(split_heads(k, G)), split_heads(log_decay, G), None
    if self.rows is not None:
      weights, chosen = jax.nn.softmax(wide(k)), self.rows.select(wide(k))
      k = self.rows.normalized(weights, chosen).astype(self.dtype)
      log_decay, selection = jnp.where(chosen, log_decay, 0.0), (weights, chosen)
    y, recurrent = linear_attention(
      features(split_heads(q, self.num_heads)),
      k,
      split_heads(v, G),
      log_decay=log_decay,
      scale=self.key_dim**-0.5,
      **self._place(recurrent, segment_ids),
    )
    gate = None if self.g_proj is None else split_heads(self.g_proj(x), self.num_heads)
    out = self.o_proj(merge_heads(self.norm(y, gate=gate, dtype=self.dtype)))
    return out, GLAState(recurrent, convs) if convs else recurrent, selection


@register_state
class RetNetState(NamedTuple):
  """Recurrent state of `RetNet`."""

  recurrent: LinearAttentionState  # kv [B, H, K, V] float32
  position: jax.Array  # [B] int32, the number of tokens of the segment so far


class RetNet(Mixer[RetNetState]):
  r"""Multi-scale retention: one constant decay per head, and positions as rotations.

      q_t = R_t W_q x_t,  k_t = R_t W_k x_t,  v_t = W_v x_t       R_t rotates pairs of channels by t
      S_t = gamma_h S_{t-1} + k_t v_t^T,      y_t = K^(-1/2) S_t^T q_t             per head h
      out_t = W_o (silu(W_g x_t) * RMSNorm(y_t))                          gamma_h = 1 - 2^(-5 - h)

  The norm is over the V channels of each head, with one scale [V] for all heads. K = D / H must be
  even. The defaults are those of fla's layer, `MultiScaleRetention` (its models have
  norm_eps=1e-6). The authors' torchscale has frequencies="torchscale", norm_scale=False and
  norm_eps=1e-6; the repository's current version starts W_o with output_gain=0.5 instead of 1.

  Args:
    dim: D, the width of input and output.
    num_heads: H; it sets the decays, from 31/32 for the first head on.
    num_kv_heads: the number of key and value heads, a divisor of H. None means H.
    expand_v: H V / D. Longhorn's experiments have 1.796875.
    frequencies: of pair i of K / 2: "rope" for 10000^(-2 i / K), or "torchscale" for
      10000^(-i / (K / 2 - 1)). Pairs are channels i and i + K / 2; in torchscale 2 i and 2 i + 1,
      another order of the same rows of W_q and W_k.
    norm_scale: whether the norm has a scale.
    output_gain: the Xavier gain of the initial W_o.
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, K is odd, values do not divide evenly among the heads, or
      `frequencies` is unknown.

  Source: RetNet (Sun et al. 2023), eqs. 5-8; kernels start Xavier-uniform as in its published code,
  with gain 2^(-5/2). That code also divides rows of scores by their sum, and by roots of sums of
  decays: the norm removes such a factor, up to its eps.
  """

  name = "retnet"
  starts_as_model = True
  set_by_model = ("num_heads",)
  recurrence_flops = flops.linear_attention

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    expand_v: float = 2.0,
    frequencies: str = "rope",
    norm_scale: bool = True,
    output_gain: float = 1.0,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_heads(dim, num_heads)
    self.key_dim, self.value_dim = check_head_widths(dim, num_heads, 1, expand_v)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    if self.key_dim % 2:
      raise ValueError(
        f"dim={dim} and num_heads={num_heads} give keys of odd width {self.key_dim}, but pairs of "
        "channels rotate; change one of the two."
      )
    self.num_kv_heads = G = check_groups("num_kv_heads", num_kv_heads, num_heads)
    check_choice("frequencies", frequencies, FREQUENCIES)
    # 10000^(-i / (n - 1)) for i < n = K / 2 are the frequencies of another base.
    pairs = self.key_dim // 2
    torchscale = frequencies == "torchscale" and pairs > 1
    self.rotary_base = 10000.0 ** (pairs / (pairs - 1)) if torchscale else 10000.0
    values = num_heads * self.value_dim
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    linear = functools.partial(Linear, kernel_init=xavier_uniform(2**-2.5), **options)
    self.q_proj, self.k_proj = linear(dim, dim), linear(dim, G * self.key_dim)
    self.v_proj, self.g_proj = linear(dim, G * self.value_dim), linear(dim, values)
    self.norm = RMSNorm(self.value_dim, eps=norm_eps, use_scale=norm_scale, param_dtype=param_dtype)
    self.o_proj = linear(values, dim, kernel_init=xavier_uniform(output_gain))

  def _init_state(self, B):
    kv = jnp.zeros((B, self.num_heads, self.key_dim, self.value_dim), jnp.float32)
    return RetNetState(LinearAttentionState(kv, None), jnp.zeros(B, jnp.int32))

  def _mix(self, x, state, segment_ids):
    B, T, _ = x.shape
    recurrent, position = state if state is not None else (None, jnp.zeros(B, jnp.int32))
    axis = self.sequence_axis
    positions, position = step_positions(B, T, segment_ids, position, axis_name=axis)
    heads = lambda z: split_heads(z, self.num_heads)
    k, v = (split_heads(p(x), self.num_kv_heads) for p in (self.k_proj, self.v_proj))
    # log1p: in float32, 1 - 2^(-5 - h) itself would be 1 from h = 20 on.
    log_decay = jnp.log1p(-(2.0 ** (-5.0 - jnp.arange(self.num_heads))))
    y, recurrent = linear_attention(
      rotary_embedding(heads(self.q_proj(x)), positions, self.rotary_base),
      rotary_embedding(k, positions, self.rotary_base),
      v,
      log_decay=log_decay,
      scale=self.key_dim**-0.5,
      **self._place(recurrent, segment_ids),
    )
    y = self.norm(y, gate=heads(self.g_proj(x)), dtype=self.dtype)
    return self.o_proj(merge_heads(y)), RetNetState(recurrent, position)

"""Gated slot attention: softmax attention over a few slots that are written gradually."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import SelectingMixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.activations import log_gate
from lnssm_jax.mixers.common.checks import (
  check_choice,
  check_groups,
  check_heads,
  check_normalizer,
  check_positive,
)
from lnssm_jax.mixers.common.initializers import xavier_uniform
from lnssm_jax.mixers.common.norms import RMSNorm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.mixers.common.routing import RowSparsity
from lnssm_jax.mixers.common.short_convolution import ShortConvolution, convolve_each
from lnssm_jax.ops import ConvState, LinearAttentionState, linear_attention
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state

FEATURE_MAPS = {"silu": jax.nn.silu, "relu": jax.nn.relu}


@register_state
class GSAState(NamedTuple):
  """Recurrent state of `GSA`, float32."""

  keys: LinearAttentionState  # kv [B, G, K, M], the slots' keys, transposed
  values: LinearAttentionState  # kv [B, G, M, V], the slots' values
  convs: tuple[ConvState, ...] = ()  # with convolutions, the inputs of those of q, k, v


class GSA(SelectingMixer[GSAState]):
  r"""Gated slot attention: M slots, each with a key and a value, with a forget gate per slot.

      q_t = silu(W_q x_t),  k_t = silu(W_k x_t),  v_t = silu(W_v x_t)
      f_t = sigmoid(W_f x_t)^(1 / tau),  s_t = 1 - f_t                             per slot
      P_t = diag(f_t) P_{t-1} + s_t k_t^T,  R_t = diag(f_t) R_{t-1} + s_t v_t^T    per head
      y_t = R_t^T softmax(scale * P_t q_t),      out_t = W_o RMSNorm(silu(y_t))

  Two linear attentions with a softmax between them. K = V = D / H. The norm is over all D channels.
  The defaults are those of fla's layer, `GatedSlotAttention`, which norms with eps 1e-5 whatever
  its norm_eps (0.6.0); its expand_k, expand_v and learned feature map are not offered, and its
  use_output_gate changes nothing.

  Args:
    dim: D, the width; a multiple of `num_heads`.
    num_heads: H.
    num_kv_heads: G, the number of heads of keys, values and slots, a divisor of H: each serves
      equally many query heads. None means H.
    num_slots: M.
    feature_map: of queries and keys, "silu" or "relu".
    conv_size: the tokens seen by the convolutions of q, k and v, each followed by silu; None for no
      convolutions.
    gate_logit_normalizer: tau; larger values give the slots longer memory.
    scale: of the scores; a Python number.
    selected_rows: k, the slots that a token decays and writes, those of its largest s_t; None for
      all. The others keep decay 1. `RowSparsity` has the source.
    balance: coefficient of the balance loss of `selected_rows`, which `with_aux` returns.
    mass: in that loss, the mean weight of the "selected" rows, or of all ("full").
    norm_eps: eps of the norm, under the root.
    norm_scale: whether the norm has a scale for each channel.
    dtype: of the projections and of q, k, v; decays, scores, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive or does not fit, or
      `feature_map` is unknown.

  Source: GSA (Zhang et al. 2024), section 3; activations, norm and scale as in its published code,
  whose kernels start Xavier-uniform with gain 2^(-5/2).
  """

  name = "gsa"
  starts_as_model = True
  set_by_model = ("num_heads",)
  recurrence_flops = flops.linear_attention

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    num_slots: int = 64,
    feature_map: str = "silu",
    conv_size: int | None = None,
    gate_logit_normalizer: float = 8.0,
    scale: float = 1.0,
    selected_rows: int | None = None,
    balance: float = 0.01,
    mass: str = "selected",
    norm_eps: float = 1e-5,
    norm_scale: bool = True,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.head_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    self.num_slots = check_positive("num_slots", num_slots)
    self.rows = RowSparsity.checked(selected_rows, "num_slots", num_slots, balance, mass)
    self.num_kv_heads = G = check_groups("num_kv_heads", num_kv_heads, num_heads)
    self.feature_map = check_choice("feature_map", feature_map, FEATURE_MAPS)
    keys = G * self.head_dim
    self.gate_logit_normalizer = check_normalizer(gate_logit_normalizer)
    self.scale = float(scale)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    linear = functools.partial(Linear, dim, kernel_init=xavier_uniform(2**-2.5), **options)
    self.q_proj, self.k_proj, self.v_proj = linear(dim), linear(keys), linear(keys)
    self.f_proj = linear(G * num_slots)
    self.norm = RMSNorm(dim, eps=norm_eps, use_scale=norm_scale, param_dtype=param_dtype)
    self.o_proj = linear(dim)
    conv = functools.partial(ShortConvolution, use_bias=False, activation="silu", **options)
    convs = [None if conv_size is None else conv(n, conv_size) for n in (dim, keys, keys)]
    self.q_conv, self.k_conv, self.v_conv = convs

  @property
  def _convs(self) -> tuple[ShortConvolution, ...]:
    convs = (self.q_conv, self.k_conv, self.v_conv)
    return tuple(conv for conv in convs if conv is not None)

  def _init_state(self, B):
    G, K, M = self.num_kv_heads, self.head_dim, self.num_slots
    empty = lambda *shape: LinearAttentionState(jnp.zeros((B, G, *shape), jnp.float32), None)
    convs = tuple(conv.init_state(B) for conv in self._convs)
    return GSAState(keys=empty(K, M), values=empty(M, K), convs=convs)

  def _log_decays(self, x, state, segment_ids):
    return super()._log_decays(x, state, segment_ids)[-1:]  # both memories have those of the slots

  def _run(self, x, state, segment_ids):
    """(out, state, (weights, whether selected) of the rows [B, T, heads, rows], or None)."""
    keys, values, convs = state if state is not None else (None, None, ())
    streams = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
    streams, convs = convolve_each(self._convs, streams, convs, segment_ids)
    G = self.num_kv_heads
    mapped = lambda z, function: function(wide(z)).astype(self.dtype)
    feature_map = FEATURE_MAPS[self.feature_map]
    q = split_heads(mapped(streams[0], feature_map), self.num_heads)
    k = split_heads(mapped(streams[1], feature_map), G)
    v = split_heads(mapped(streams[2], jax.nn.silu), G)
    log_keep, selection = split_heads(log_gate(self.f_proj(x), self.gate_logit_normalizer), G), None
    if self.rows is not None:
      weights = -jnp.expm1(log_keep)
      chosen = self.rows.select(weights)
      log_keep, selection = jnp.where(chosen, log_keep, 0.0), (weights, chosen)
    write = -jnp.expm1(log_keep)
    # The output has the dtype of the values: float32 for scores, which softmax magnifies.
    scores, keys = linear_attention(
      q,
      k,
      write,
      value_log_decay=log_keep,
      scale=1.0,
      **self._place(keys, segment_ids),
    )
    y, values = linear_attention(
      jax.nn.softmax(self.scale * scores, axis=-1).astype(self.dtype),
      write.astype(self.dtype),
      v,
      log_decay=log_keep,
      scale=1.0,
      **self._place(values, segment_ids),
    )
    y = self.norm(jax.nn.silu(wide(merge_heads(y))))
    return self.o_proj(y.astype(self.dtype)), GSAState(keys, values, convs), selection

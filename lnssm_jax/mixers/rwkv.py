"""Time mixers of the RWKV family."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import (
  check_choice,
  check_head_widths,
  check_heads,
  check_layer,
  check_positive,
)
from lnssm_jax.mixers.common.initializers import (
  channel_decay,
  orthogonal,
  shift_weight,
  uniform_fan_in,
  zigzag_bonus,
)
from lnssm_jax.mixers.common.norms import LayerNorm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.mixers.common.token_shift import interpolated, last_input
from lnssm_jax.ops import LinearAttentionState, WKV4State, linear_attention, wkv4
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state

# The published code divides by 8, the root of its head width, before the norm.
_OUTPUT_DIVISOR = 8.0

DECAYS = ("channel", "head")

# exp(-exp(20)) is 0 in float64 already; a larger exponent would only overflow exp(w) itself.
_LARGEST_RATE = 20.0


@register_state
class RWKV4State(NamedTuple):
  """Recurrent state of `RWKV4`, float32."""

  shift: jax.Array  # [B, D], the last input
  recurrent: WKV4State  # max, numerator, denominator [B, D]


class RWKV4(Mixer[RWKV4State]):
  r"""RWKV-4's time mixer: per channel a decaying mean of values, weighted by exp(k).

      x^s_t = mu_s * x_t + (1 - mu_s) * x_{t-1}                one stream for each of r, k, v
      k_t = W_k x^k_t,  v_t = W_v x^v_t
      y_t = (sum_{j<t} exp(k_j - (t - 1 - j) exp(w)) v_j + exp(u + k_t) v_t) / (same with v = 1)
      out_t = W_o (sigmoid(W_r x^r_t) * y_t)

  Every y_t lies between the smallest and the largest value so far. Initially W_r, W_k and W_o are
  zero and W_v is orthogonal.

  Args:
    dim: D, the width.
    layer, num_layers: the layer's index in its model, for the initial decays and shifts. `layer`
      counts from 0 and may be traced.
    dtype: of the projections and of v; k, decays, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive.

  Source: RWKV (Peng et al. 2023), eqs. 11-18; initialization as in its published code.
  """

  name = "rwkv4"
  set_by_model = ("layer", "num_layers")
  recurrence_flops = flops.wkv4

  def __init__(
    self,
    dim: int,
    *,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    check_layer(layer, num_layers)
    param = lambda value: nnx.Param(value.astype(param_dtype))
    place = {"layer": layer, "num_layers": num_layers}
    self.mu_r = param(shift_weight(dim, **place, power=0.5))
    self.mu_k = param(shift_weight(dim, **place))
    self.mu_v = param(shift_weight(dim, **place, offset=0.3))
    self.w = param(channel_decay(dim, **place))
    zigzag = (jnp.arange(dim) + 1) % 3 - 1.0
    self.u = param(math.log(0.3) + 0.5 * zigzag)

    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    linear = lambda init: Linear(dim, dim, kernel_init=init, **options)
    zeros = nnx.initializers.zeros_init()
    self.r_proj, self.k_proj = linear(zeros), linear(zeros)
    self.v_proj, self.o_proj = linear(orthogonal(1.0)), linear(zeros)

  def _init_state(self, B):
    return RWKV4State(jnp.zeros((B, self.dim), jnp.float32), wkv4.init_state(batch=B, dim=self.dim))

  def _mix(self, x, state, segment_ids):
    previous, recurrent = state if state is not None else (None, None)
    weights, place = (self.mu_k, self.mu_v, self.mu_r), {"axis_name": self.sequence_axis}
    streams = interpolated(x, weights, previous, segment_ids, **place, dtype=self.dtype)
    of_k, of_v, of_r = streams
    y, recurrent = wkv4(
      wide(self.k_proj(of_k)),
      self.v_proj(of_v),
      jnp.exp(wide(self.w[...])),
      wide(self.u[...]),
      **self._place(recurrent, segment_ids),
    )
    gate = jax.nn.sigmoid(wide(self.r_proj(of_r)))
    out = self.o_proj((gate * wide(y)).astype(self.dtype))
    return out, RWKV4State(last_input(x, self.sequence_axis), recurrent)


@register_state
class RWKV5State(NamedTuple):
  """Recurrent state of `RWKV5` and `RWKV6`, float32."""

  shift: jax.Array  # [B, D], the last input
  recurrent: LinearAttentionState  # kv [B, H, K, K]


class _MatrixValued(Mixer[RWKV5State]):
  """The projections of RWKV-5 and RWKV-6, their matrix-valued state, norm and output gate."""

  set_by_model = ("num_heads", "layer", "num_layers")

  dim: int
  num_heads: int
  head_dim: int
  key_dim: int
  dtype: jnp.dtype
  recurrence_flops = functools.partialmethod(flops.linear_attention, bonus=True)

  def _build(self, layer, num_layers, *, norm_eps, dtype, param_dtype, rngs):
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    keys = functools.partial(Linear, self.dim, self.num_heads * self.key_dim, **options)
    linear = functools.partial(Linear, self.dim, self.dim, **options)
    large, small = orthogonal(1.0), orthogonal(0.1)
    self.r_proj, self.k_proj = keys(kernel_init=large), keys(kernel_init=small)
    self.v_proj, self.g_proj = linear(kernel_init=large), linear(kernel_init=small)
    self.o_proj = linear(kernel_init=nnx.initializers.zeros_init())
    self.norm = LayerNorm(self.dim, eps=norm_eps, param_dtype=param_dtype)
    self.norm.eps *= _OUTPUT_DIVISOR**2  # instead of dividing y
    height = (1.0 + jnp.asarray(layer, jnp.float32)) / num_layers
    self.norm.scale = nnx.Param(jnp.full(self.dim, height**0.7).astype(param_dtype))

  def _init_state(self, B):
    shape = (B, self.num_heads, self.key_dim, self.head_dim)
    recurrent = LinearAttentionState(jnp.zeros(shape, jnp.float32), None)
    return RWKV5State(jnp.zeros((B, self.dim), jnp.float32), recurrent)

  def _output(self, y: jax.Array, of_g: jax.Array) -> jax.Array:
    """W_o of the normalized, gated y [B, T, H, K]; `of_g` [B, T, D] is the input of the gate."""
    gate = split_heads(self.g_proj(of_g), self.num_heads)
    return self.o_proj(merge_heads(self.norm.per_head(y, gate=gate, dtype=self.dtype)))


class RWKV5(_MatrixValued):
  r"""RWKV-5's time mixer: a matrix-valued state with a constant decay per channel.

      x^s_t = mu_s * x_t + (1 - mu_s) * x_{t-1}             one stream for each of r, k, v, g
      r_t = W_r x^r_t,  k_t = W_k x^k_t,  v_t = W_v x^v_t
      y_t = (S_{t-1} + diag(u) k_t v_t^T)^T r_t                                    per head
      S_t = diag(exp(-exp(w))) S_{t-1} + k_t v_t^T
      out_t = W_o (silu(W_g x^g_t) * GroupNorm(y_t / 8))

  The norm has one group per head, and a scale and a bias per channel. Initially W_o is zero, W_r
  and W_v are orthogonal, W_k and W_g 0.1 times that, and the norm's scale is
  ((1 + layer) / num_layers)^0.7.

  Args:
    dim: D, the width; a multiple of `num_heads`. The width of a head is K = D / H, 64 in the
      published models.
    num_heads: H.
    layer, num_layers: the layer's index in its model, for the initial decays, bonuses and shifts.
      `layer` counts from 0 and may be traced.
    decay: "channel" for w and u [D], or "head" for one number each per head, as in RWKV "x051a",
      the RWKV-5 for language models of GPT-2's kind, and so of Longhorn's experiments; u starts
      there without the small differences between neighbors.
    norm_eps: eps of the norm, after the published division of y by 8.
    dtype: of the projections and of r, k, v; decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive, or `decay` is
      unknown.

  Source: Eagle (RWKV-5, Peng et al. 2024), eqs. 3-9; initialization as in its published code.
  """

  name = "rwkv5"

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    decay: str = "channel",
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.head_dim = self.key_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    check_layer(layer, num_layers)
    param = lambda value: nnx.Param(value.astype(param_dtype))
    place = {"layer": layer, "num_layers": num_layers}
    self.mu_r = param(shift_weight(dim, **place, power=0.5))
    self.mu_k = param(shift_weight(dim, **place))
    self.mu_v = param(shift_weight(dim, **place, offset=0.3))
    self.mu_g = param(shift_weight(dim, **place, power=0.5))
    of_channels = check_choice("decay", decay, DECAYS) == "channel"
    numbers = dim if of_channels else num_heads
    self.w = param(channel_decay(numbers, **place, lowest=-6.0, span=5.0))
    self.u = param(zigzag_bonus(numbers, **place, zigzag=0.1 if of_channels else 0.0))
    self._build(
      layer, num_layers, norm_eps=norm_eps, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )

  def _mix(self, x, state, segment_ids):
    previous, recurrent = state if state is not None else (None, None)
    weights = (self.mu_r, self.mu_k, self.mu_v, self.mu_g)
    place = {"axis_name": self.sequence_axis, "dtype": self.dtype}
    of_r, of_k, of_v, of_g = interpolated(x, weights, previous, segment_ids, **place)
    heads = lambda z: split_heads(z, self.num_heads)
    size = (self.num_heads, self.head_dim)
    per_head = lambda p: jnp.broadcast_to(wide(p[...]).reshape(self.num_heads, -1), size)
    y, recurrent = linear_attention(
      heads(self.r_proj(of_r)),
      heads(self.k_proj(of_k)),
      heads(self.v_proj(of_v)),
      log_decay=-jnp.exp(per_head(self.w)),
      bonus=per_head(self.u),
      scale=1.0,
      **self._place(recurrent, segment_ids),
    )
    out = self._output(y, of_g)
    return out, RWKV5State(last_input(x, self.sequence_axis), recurrent)


class RWKV6(_MatrixValued):
  r"""RWKV-6's time mixer: RWKV-5 with data-dependent decays and token shifts.

      d_t = x_{t-1} - x_t
      m^s_t = tanh((x_t + d_t * mu_x) M_1)_s M_2^s          one for each stream s of w, k, v, r, g
      x^s_t = x_t + d_t * (mu_s + m^s_t)
      r_t = W_r x^r_t,  k_t = W_k x^k_t,  v_t = W_v x^v_t,  w_t = w + W_2 tanh(W_1 x^w_t)
      y_t = (S_{t-1} + diag(u) k_t v_t^T)^T r_t                                    per head
      S_t = diag(exp(-exp(w_t))) S_{t-1} + k_t v_t^T
      out_t = W_o (silu(W_g x^g_t) * GroupNorm(y_t / 8))

  Here mu weights the previous token; in RWKV-5 it weights the current one. The norm has one group
  per head, and a scale and a bias per channel. At the start M_1 and W_1 are zero, M_2 and W_2
  uniform within 0.01, mu is 1 minus that of RWKV-5, and all else as in RWKV-5, to which the layer
  is then equal.

  Args:
    dim: D, the width; a multiple of `num_heads`. The width of a head is K = D / H, 64 in the
      published models.
    num_heads: H.
    layer, num_layers: the layer's index in its model, for the initial decays, bonuses and shifts.
      `layer` counts from 0 and may be traced.
    expand_k: H times the width of a head's keys, in parts of D; the values of a head have D / H.
      fla's layer has 0.5 by default.
    mix_rank: the width of M_1 for one stream.
    gate_rank: the width of W_1.
    norm_eps: eps of the norm, after the published division of y by 8.
    dtype: of the projections and of r, k, v; decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: `dim` or expand_k D is not a multiple of `num_heads`, or a size is not positive.

  Source: Finch (RWKV-6, Peng et al. 2024), eqs. 10-19; the order of streams, ranks and
  initialization as in its published code.
  """

  name = "rwkv6"
  sharding = ((r"mix_up", (None, None, "fsdp")),)  # [5, rank, D]

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    expand_k: float = 1.0,
    mix_rank: int = 32,
    gate_rank: int = 64,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.key_dim, self.head_dim = check_head_widths(dim, num_heads, expand_k, 1.0)
    keys = num_heads * self.key_dim
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    self.mix_rank = check_positive("mix_rank", mix_rank)
    check_positive("gate_rank", gate_rank)
    check_layer(layer, num_layers)
    param = lambda value: nnx.Param(value.astype(param_dtype))
    place = {"layer": layer, "num_layers": num_layers}
    previous = lambda **options: param(1 - shift_weight(dim, **place, **options))
    self.mu_x, self.mu_w, self.mu_k = previous(), previous(), previous()
    self.mu_v = previous(offset=0.3)
    self.mu_r, self.mu_g = previous(power=0.5), previous(power=0.5)
    self.w = param(channel_decay(keys, **place, lowest=-6.0, span=5.0))
    self.u = param(zigzag_bonus(keys, **place))

    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    zeros, small = nnx.initializers.zeros_init(), uniform_fan_in(1, gain=0.01)
    self.mix_down_proj = Linear(dim, 5 * mix_rank, kernel_init=zeros, **options)
    self.mix_up = nnx.Param(small(rngs.params(), (5, mix_rank, dim), param_dtype))
    self.decay_down_proj = Linear(dim, gate_rank, kernel_init=zeros, **options)
    self.decay_up_proj = Linear(gate_rank, keys, kernel_init=small, **options)
    self._build(layer, num_layers, norm_eps=norm_eps, **options)

  def _mix(self, x, state, segment_ids):
    previous, recurrent = state if state is not None else (None, None)
    of_w, of_k, of_v, of_r, of_g = self._streams(x, previous, segment_ids)
    heads = lambda z: split_heads(z, self.num_heads)
    w = wide(self.w[...]) + wide(self.decay_up_proj(jnp.tanh(self.decay_down_proj(of_w))))
    y, recurrent = linear_attention(
      heads(self.r_proj(of_r)),
      heads(self.k_proj(of_k)),
      heads(self.v_proj(of_v)),
      log_decay=heads(-jnp.exp(jnp.minimum(w, _LARGEST_RATE))),
      bonus=wide(self.u[...]).reshape(self.num_heads, self.key_dim),
      scale=1.0,
      **self._place(recurrent, segment_ids),
    )
    out = self._output(y, of_g)
    return out, RWKV5State(last_input(x, self.sequence_axis), recurrent)

  def _streams(self, x, previous, segment_ids):
    """Returns the inputs [B, T, D] of w, k, v, r and g."""
    place = {"axis_name": self.sequence_axis, "dtype": self.dtype}

    def shifted(*weights, offsets=None):  # these weights are of the token before
      present = [1 - wide(mu[...]) for mu in weights]
      return interpolated(x, present, previous, segment_ids, offsets=offsets, **place)

    (mixed,) = shifted(self.mu_x)
    mixed = jnp.tanh(self.mix_down_proj(mixed))
    # Streams are columns, because slices of an array along its first axis would have their
    # gradients stacked, which is a copy.
    up = self.mix_up[...].astype(self.dtype)
    if x.shape[1] == 1:
      offsets = jnp.einsum("bsr,srd->bsd", mixed.reshape(-1, 5, self.mix_rank), up)
      offsets = offsets.reshape(-1, 1, 5 * self.dim)
    else:
      # One product for all, of a block-diagonal matrix: five of so few channels take longer.
      diagonal = jnp.eye(5, dtype=up.dtype)[:, None, :, None] * up[:, :, None]
      offsets = mixed @ diagonal.reshape(5 * self.mix_rank, 5 * self.dim)
    return shifted(self.mu_w, self.mu_k, self.mu_v, self.mu_r, self.mu_g, offsets=offsets)

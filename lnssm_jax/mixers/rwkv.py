"""Time mixers of the RWKV family."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_call, check_heads, check_layer, check_positive
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.initializers import (
  channel_decay,
  orthogonal,
  shift_weight,
  uniform_fan_in,
  zigzag_bonus,
)
from lnssm_jax.mixers.layers import (
  group_norm,
  interpolate,
  last_input,
  linear,
  merge_heads,
  silu_gate,
  split_heads,
  token_shift,
  wide,
)
from lnssm_jax.ops import LinearAttentionState, WKV4State
from lnssm_jax.ops.sequence_parallel import linear_attention, wkv4
from lnssm_jax.ops.wkv4.state import empty_state

# The published code divides by 8, the root of its head width, before a norm with this epsilon.
_OUTPUT_DIVISOR = 8.0
_NORM_EPS = 1e-5

# exp(-exp(20)) is 0 in float64 already; a larger exponent would only overflow exp(w) itself.
_LARGEST_RATE = 20.0


class RWKV4State(NamedTuple):
  """What a layer remembers of a sequence. float32."""

  shift: jax.Array  # [B, D], the last input
  memory: WKV4State  # max, numerator, denominator [B, D]


class RWKV4(Divisible):
  r"""RWKV-4's time mixer: per channel a decaying mean of values, weighted by exp(k).

      x^s_t = mu_s * x_t + (1 - mu_s) * x_{t-1}                one stream for each of r, k, v
      k_t = W_k x^k_t,  v_t = W_v x^v_t
      y_t = (sum_{j<t} exp(k_j - (t - 1 - j) exp(w)) v_j + exp(u + k_t) v_t) / (same with v = 1)
      out_t = W_o (sigmoid(W_r x^r_t) * y_t)

  Every y_t lies between the smallest and the largest value so far. Initially W_r, W_k and W_o are
  zero and W_v is orthogonal.

  Args:
    dim: D, the width.
    layer, num_layers: where the layer stands in its model, for the initial decays and shifts.
      `layer` counts from 0 and may be traced.
    dtype: of the projections and of v; k, decays, the state and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Raises:
    ValueError: a size is not positive.

  Source: RWKV (Peng et al. 2023), eqs. 11-18; initialisation as in its published code.
  """

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

    def projection(init):
      return linear(dim, dim, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    zeros = nnx.initializers.zeros_init()
    self.r_proj, self.k_proj = projection(zeros), projection(zeros)
    self.v_proj, self.o_proj = projection(orthogonal(1.0)), projection(zeros)

  def init_state(self, batch_size: int) -> RWKV4State:
    """The state before the first token: no input, and an empty mean."""
    B = check_positive("batch_size", batch_size)
    return RWKV4State(jnp.zeros((B, self.dim), jnp.float32), empty_state(B, self.dim, jnp.float32))

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: RWKV4State | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, RWKV4State]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    previous, memory = state if state is not None else (None, None)
    shifted = token_shift(x, previous, segment_ids, axis_name=self.sequence_axis)
    stream = lambda mu: interpolate(x, shifted, mu[...]).astype(self.dtype)
    y, memory = wkv4(
      wide(self.k_proj(stream(self.mu_k))),
      self.v_proj(stream(self.mu_v)),
      jnp.exp(wide(self.w[...])),
      wide(self.u[...]),
      axis_name=self.sequence_axis,
      initial_state=memory,
      segment_ids=segment_ids,
    )
    gate = jax.nn.sigmoid(wide(self.r_proj(stream(self.mu_r))))
    out = self.o_proj((gate * wide(y)).astype(self.dtype))
    return out, RWKV4State(last_input(x, self.sequence_axis), memory)


class RWKV5State(NamedTuple):
  """What a layer remembers of a sequence. float32."""

  shift: jax.Array  # [B, D], the last input
  memory: LinearAttentionState  # kv [B, H, K, K]


class _MatrixValued(Divisible):
  """What RWKV-5 and RWKV-6 share: the state, and the way from the scan to the output."""

  dim: int
  num_heads: int
  head_dim: int
  dtype: jnp.dtype
  norm_gain: nnx.Param
  norm_bias: nnx.Param
  g_proj: nnx.Linear
  o_proj: nnx.Linear

  def init_state(self, batch_size: int) -> RWKV5State:
    """The state before the first token: zeros."""
    B, H, K = check_positive("batch_size", batch_size), self.num_heads, self.head_dim
    memory = LinearAttentionState(jnp.zeros((B, H, K, K), jnp.float32), None)
    return RWKV5State(shift=jnp.zeros((B, self.dim), jnp.float32), memory=memory)

  def _output(self, y: jax.Array, of_g: jax.Array) -> jax.Array:
    """W_o of the normed, gated y [B, T, H, K]; `of_g` [B, T, D] is what the gate reads."""
    y = merge_heads(group_norm(wide(y) / _OUTPUT_DIVISOR, eps=_NORM_EPS))
    y = y * wide(self.norm_gain[...]) + wide(self.norm_bias[...])
    return self.o_proj(silu_gate(y, self.g_proj(of_g)).astype(self.dtype))


class RWKV5(_MatrixValued):
  r"""RWKV-5's time mixer: a matrix-valued state with a constant decay per channel.

      x^s_t = mu_s * x_t + (1 - mu_s) * x_{t-1}             one stream for each of r, k, v, g
      r_t = W_r x^r_t,  k_t = W_k x^k_t,  v_t = W_v x^v_t
      y_t = (S_{t-1} + diag(u) k_t v_t^T)^T r_t                                     for each head
      S_t = diag(exp(-exp(w))) S_{t-1} + k_t v_t^T
      out_t = W_o (silu(W_g x^g_t) * GroupNorm(y_t / 8))

  The norm has one group a head, and a scale and a bias per channel. Initially W_o is zero, W_r and
  W_v are orthogonal, W_k and W_g 0.1 times that, and the norm's scale is
  ((1 + layer) / num_layers)^0.7.

  Args:
    dim: D, the width; a multiple of `num_heads`. The width of a head is K = D / H, 64 in the
      published models.
    layer, num_layers: where the layer stands in its model, for the initial decays, bonuses and
      shifts. `layer` counts from 0 and may be traced.
    dtype: of the projections and of r, k, v; decays, norm, the state and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Source: Eagle (RWKV-5, Peng et al. 2024), eqs. 3-9; initialisation as in its published code.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.head_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    check_layer(layer, num_layers)

    param = lambda value: nnx.Param(value.astype(param_dtype))
    place = {"layer": layer, "num_layers": num_layers}
    self.mu_r = param(shift_weight(dim, **place, power=0.5))
    self.mu_k = param(shift_weight(dim, **place))
    self.mu_v = param(shift_weight(dim, **place, offset=0.3))
    self.mu_g = param(shift_weight(dim, **place, power=0.5))
    self.w = param(channel_decay(dim, **place, lowest=-6.0, span=5.0))
    self.u = param(zigzag_bonus(dim, **place))

    def projection(init):
      return linear(dim, dim, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    self.r_proj, self.k_proj = projection(orthogonal(1.0)), projection(orthogonal(0.1))
    self.v_proj, self.g_proj = projection(orthogonal(1.0)), projection(orthogonal(0.1))
    self.o_proj = projection(nnx.initializers.zeros_init())
    height = (1.0 + jnp.asarray(layer, jnp.float32)) / num_layers
    self.norm_gain = param(jnp.full(dim, height**0.7))
    self.norm_bias = param(jnp.zeros(dim))

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: RWKV5State | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, RWKV5State]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    previous, memory = state if state is not None else (None, None)
    shifted = token_shift(x, previous, segment_ids, axis_name=self.sequence_axis)
    stream = lambda mu: interpolate(x, shifted, mu[...]).astype(self.dtype)
    heads = lambda z: split_heads(z, self.num_heads)
    per_head = lambda p: wide(p[...]).reshape(self.num_heads, self.head_dim)
    y, memory = linear_attention(
      heads(self.r_proj(stream(self.mu_r))),
      heads(self.k_proj(stream(self.mu_k))),
      heads(self.v_proj(stream(self.mu_v))),
      log_decay=-jnp.exp(per_head(self.w)),
      bonus=per_head(self.u),
      axis_name=self.sequence_axis,
      initial_state=memory,
      segment_ids=segment_ids,
    )
    return self._output(y, stream(self.mu_g)), RWKV5State(last_input(x, self.sequence_axis), memory)


class RWKV6(_MatrixValued):
  r"""RWKV-6's time mixer: RWKV-5 with decays and token shifts that depend on the input.

      d_t = x_{t-1} - x_t
      m^s_t = tanh((x_t + d_t * mu_x) M_1)_s M_2^s          one for each stream s of w, k, v, r, g
      x^s_t = x_t + d_t * (mu_s + m^s_t)
      r_t = W_r x^r_t,  k_t = W_k x^k_t,  v_t = W_v x^v_t,  w_t = w + W_2 tanh(W_1 x^w_t)
      y_t = (S_{t-1} + diag(u) k_t v_t^T)^T r_t                                     for each head
      S_t = diag(exp(-exp(w_t))) S_{t-1} + k_t v_t^T
      out_t = W_o (silu(W_g x^g_t) * GroupNorm(y_t / 8))

  Here mu weighs the token before; in RWKV-5 it weighs the present one. The norm has one group a
  head, and a scale and a bias per channel. At the start M_1 and W_1 are zero, M_2 and W_2 uniform
  within 0.01, mu is 1 minus that of
  RWKV-5, and all else as in RWKV-5, whose layer it then is.

  Args:
    dim: D, the width; a multiple of `num_heads`. The width of a head is K = D / H, 64 in the
      published models.
    layer, num_layers: where the layer stands in its model, for the initial decays, bonuses and
      shifts. `layer` counts from 0 and may be traced.
    mix_rank, decay_rank: the widths of M_1 for one stream and of W_1.
    dtype: of the projections and of r, k, v; decays, norm, the state and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Source: Finch (RWKV-6, Peng et al. 2024), eqs. 10-19; the order of streams, ranks and
  initialisation as in its published code.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    mix_rank: int = 32,
    decay_rank: int = 64,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.head_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    self.mix_rank = check_positive("mix_rank", mix_rank)
    check_positive("decay_rank", decay_rank)
    check_layer(layer, num_layers)

    param = lambda value: nnx.Param(value.astype(param_dtype))
    place = {"layer": layer, "num_layers": num_layers}
    before = lambda **options: param(1 - shift_weight(dim, **place, **options))
    self.mu_x, self.mu_w, self.mu_k = before(), before(), before()
    self.mu_v = before(offset=0.3)
    self.mu_r, self.mu_g = before(power=0.5), before(power=0.5)
    self.w = param(channel_decay(dim, **place, lowest=-6.0, span=5.0))
    self.u = param(zigzag_bonus(dim, **place))

    def projection(init, inputs=dim, outputs=dim):
      return linear(inputs, outputs, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    zeros, small = nnx.initializers.zeros_init(), uniform_fan_in(1, gain=0.01)
    self.mix_down_proj = projection(zeros, dim, 5 * mix_rank)
    self.mix_up = nnx.Param(small(rngs.params(), (5, mix_rank, dim), param_dtype))
    self.decay_down_proj = projection(zeros, dim, decay_rank)
    self.decay_up_proj = projection(small, decay_rank, dim)
    self.r_proj, self.k_proj = projection(orthogonal(1.0)), projection(orthogonal(0.1))
    self.v_proj, self.g_proj = projection(orthogonal(1.0)), projection(orthogonal(0.1))
    self.o_proj = projection(zeros)
    height = (1.0 + jnp.asarray(layer, jnp.float32)) / num_layers
    self.norm_gain = param(jnp.full(dim, height**0.7))
    self.norm_bias = param(jnp.zeros(dim))

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: RWKV5State | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, RWKV5State]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    previous, memory = state if state is not None else (None, None)
    of_w, of_k, of_v, of_r, of_g = self._streams(
      x, token_shift(x, previous, segment_ids, axis_name=self.sequence_axis)
    )
    heads = lambda z: split_heads(z, self.num_heads)
    w = wide(self.w[...]) + wide(self.decay_up_proj(jnp.tanh(self.decay_down_proj(of_w))))
    y, memory = linear_attention(
      heads(self.r_proj(of_r)),
      heads(self.k_proj(of_k)),
      heads(self.v_proj(of_v)),
      log_decay=heads(-jnp.exp(jnp.minimum(w, _LARGEST_RATE))),
      bonus=wide(self.u[...]).reshape(self.num_heads, self.head_dim),
      axis_name=self.sequence_axis,
      initial_state=memory,
      segment_ids=segment_ids,
    )
    return self._output(y, of_g), RWKV5State(last_input(x, self.sequence_axis), memory)

  def _streams(self, x, shifted):
    """The inputs [B, T, D] of w, k, v, r and g."""
    x = wide(x)
    step = wide(shifted) - x
    mixed = jnp.tanh(self.mix_down_proj((x + step * wide(self.mu_x[...])).astype(self.dtype)))
    mixed = mixed.reshape(*mixed.shape[:-1], 5, self.mix_rank)
    mixed = jnp.einsum("btsr,srd->sbtd", mixed, self.mix_up[...].astype(self.dtype))
    weights = (self.mu_w, self.mu_k, self.mu_v, self.mu_r, self.mu_g)
    return tuple(
      (x + step * (wide(mu[...]) + wide(m))).astype(self.dtype)
      for mu, m in zip(weights, mixed, strict=True)
    )

"""mLSTM, the matrix memory of xLSTM: exponential input gates and a stabilizer."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.activations import silu_gate
from lnssm_jax.mixers.common.checks import (
  check_choice,
  check_finite,
  check_head_widths,
  check_positive,
  check_soft_cap,
)
from lnssm_jax.mixers.common.norms import LayerNorm, LayerNormWithoutBias
from lnssm_jax.mixers.common.projections import (
  BlockDiagonal,
  Linear,
  merge_heads,
  split_heads,
  split_linear,
)
from lnssm_jax.mixers.common.short_convolution import ShortConvolution
from lnssm_jax.mixers.common.spans import earlier, reach, spans
from lnssm_jax.ops import ConvState, LinearAttentionState, linear_attention
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.segments import segments_of
from lnssm_jax.ops.core.sequence_parallel import states
from lnssm_jax.ops.core.states import register_state

VARIANTS = ("layer", "block")

# Multiples of 1 / _GRID up to 4,096 are exact in float32, and so are their sums.
_GRID, _LOWEST = 2.0**12, -(2.0**11)
_LARGEST_EXPONENT = 1000.0


@register_state
class MLSTMState(NamedTuple):
  """Recurrent state of `MLSTM`, float32. The sums are in units of exp(stabilizer)."""

  conv: ConvState | None  # inputs [B, W - 1, E]; None without a convolution
  recurrent: LinearAttentionState  # kv [B, H, K, V] is C, key_sum [B, H, K] is n
  stabilizer: jax.Array  # m [B, H]


class MLSTM(Mixer[MLSTMState]):
  r"""A matrix memory with an exponential input gate and a sigmoid forget gate, per head.

      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t
      log i_t = cap(W_i x_t + b_i),      log f_t = log sigmoid(cap(W_f x_t + b_f))
      m_t = max(log f_t + m_{t-1}, log i_t)                                      m_0 = 0
      C_t = f C_{t-1} + i k_t v_t^T,      n_t = f n_{t-1} + i k_t
      f = exp(log f_t + m_{t-1} - m_t),      i = exp(log i_t - m_t)
      h_t = C_t^T q_t / (max(|n_t^T q_t|, exp(-m_t)) + eps)            q_t times K^(-1/2)
      out_t = W_o (sigmoid(W_g x_t) * LayerNorm(h_t))                  norm of each head

  cap(z) = c tanh(z / c). Without eps the stabilizer m cancels: it only keeps exp in range.

  The defaults are the layer of xLSTM 7B. The first paper's is variant="block" with
  gate_soft_cap=None and norm_eps=1e-5, where E = expand D = H K = H V:

      [u_t, z_t] = W_in x_t,      c_t = silu(conv(u)_t)                over W tokens, per channel
      q_t = W_q c_t,  k_t = W_k c_t,  v_t = W_v u_t                    in blocks of channels
      gates from [q_t, k_t, v_t],  out_t = W_o ((LayerNorm(h_t) + skip * c_t) * silu(z_t))

  Args:
    dim: D, the width.
    num_heads: H.
    variant: "layer" or "block".
    expand_k: H K / D, of queries and keys ("qk_dim_factor" in transformers); None means 0.5.
    expand_v: H V / D, of values ("v_dim_factor"); None means 1.
    expand, conv_size, block_size: of a block: E / D ("proj_factor"), W, and the channels of each
      of the blocks of W_q, W_k and W_v ("qkv_proj_blocksize"); None means 2, 4 and 4.
    gate_soft_cap: c, a positive number; None for cap(z) = z, with log i_t clipped to +-1,000.
    denominator_eps: eps ("eps" in transformers); 0 as in the equations of the paper.
    use_bias: whether projections and the norm have biases, but for W_i and W_f, which always do.
      The convolution always has one.
    norm_eps: eps of the norm, under the root.
    num_layers: of the model, for the initial W_o.
    dtype: of the projections, of k times its gate, and of v; gates, norm, state and sums are
      float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size does not fit, `variant` is unknown, `gate_soft_cap` is not positive and
      finite, `denominator_eps` is negative, or an option is of the other variant.

  Sources: xLSTM (Beck et al. 2024), eqs. 19-27; the layer and its initial values, xLSTM 7B (Beck et
  al. 2025) as in `xLSTMLayer` of transformers: kernels normal with variance 2 / (5 D), that of W_o
  with standard deviation 2 / (num_layers sqrt(D)); W_i and W_f zero, b_i = -10 and b_f from 3 to 6.
  In a block b_i is normal with standard deviation 0.1, and the skip starts at 1.
  """

  name = "mlstm"
  needs_length = True
  set_by_model = ("num_heads", "num_layers")
  sharding = ((r"[qkv]_blocks/kernel", ("fsdp", None, None)),)
  recomputes = True
  recurrence_flops = flops.linear_attention

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    variant: str = "layer",
    expand_k: float | None = None,
    expand_v: float | None = None,
    expand: int | None = None,
    conv_size: int | None = None,
    block_size: int | None = None,
    gate_soft_cap: float | None = 15.0,
    denominator_eps: float = 1e-6,
    use_bias: bool = False,
    norm_eps: float = 1e-6,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.variant = check_choice("variant", variant, VARIANTS)
    if variant == "block":
      _check_absent(variant, "expand of both", expand_k=expand_k, expand_v=expand_v)
      expand_k = expand_v = check_positive("expand", 2 if expand is None else expand)
    else:
      own = {"expand": expand, "conv_size": conv_size, "block_size": block_size}
      _check_absent(variant, "expand_k and expand_v, and no convolution", **own)
    factors = 0.5 if expand_k is None else expand_k, 1.0 if expand_v is None else expand_v
    self.key_dim, self.value_dim = check_head_widths(dim, num_heads, *factors)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    check_positive("num_layers", num_layers)
    self.gate_soft_cap = check_soft_cap("gate_soft_cap", gate_soft_cap)
    self.denominator_eps = check_finite("denominator_eps", denominator_eps, least=0)
    keys, values = num_heads * self.key_dim, num_heads * self.value_dim
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

    def linear(inputs, outputs, std=(0.4 / dim) ** 0.5):
      init, bias_init = nnx.initializers.normal(std), "zeros" if use_bias else None
      return Linear(inputs, outputs, kernel_init=init, bias_init=bias_init, **options)

    def gate(inputs, bias_init):
      init = nnx.initializers.zeros_init()
      return Linear(inputs, num_heads, kernel_init=init, bias_init=bias_init, **options)

    of = lambda bias: lambda _, shape, dtype: bias.astype(dtype)
    inputs, i_bias = dim, of(jnp.full(num_heads, -10.0))
    if variant == "layer":
      self.q_proj, self.k_proj = linear(dim, keys), linear(dim, keys)
      self.v_proj, self.g_proj = linear(dim, values), linear(dim, values)
    else:
      inputs, i_bias = 3 * values, nnx.initializers.normal(0.1)
      block_size = check_positive("block_size", 4 if block_size is None else block_size)
      if values % block_size:
        raise ValueError(
          f"block_size={block_size} does not divide expand * dim = {values}; use a divisor."
        )
      blocks = lambda: BlockDiagonal(
        values, values // block_size, use_bias=use_bias, std=(0.4 / dim) ** 0.5, **options
      )
      self.in_proj, self.skip = linear(dim, 2 * values), nnx.Param(jnp.ones(values, param_dtype))
      self.q_blocks, self.k_blocks, self.v_blocks = blocks(), blocks(), blocks()
    size = check_positive("conv_size", 4 if conv_size is None else conv_size)
    conv = functools.partial(ShortConvolution, values, size, activation="silu", **options)
    self.conv = conv() if variant == "block" else None
    self.i_proj = gate(inputs, i_bias)
    self.f_proj = gate(inputs, of(jnp.linspace(3.0, 6.0, num_heads)))
    norm = LayerNorm if use_bias else LayerNormWithoutBias
    self.norm = norm(values, eps=norm_eps, param_dtype=param_dtype)
    self.o_proj = linear(values, dim, 2 / num_layers / dim**0.5)

  def _init_state(self, B):
    H, K, V = self.num_heads, self.key_dim, self.value_dim
    kv, key_sum = jnp.zeros((B, H, K, V), jnp.float32), jnp.zeros((B, H, K), jnp.float32)
    recurrent, m = LinearAttentionState(kv, key_sum), jnp.zeros((B, H), jnp.float32)
    return MLSTMState(None if self.conv is None else self.conv.init_state(B), recurrent, m)

  def _streams(self, x, conv, segment_ids):
    """(q, k, v, the inputs of the gates, a function of LayerNorm(h_t), the convolution's state)."""
    if self.conv is None:
      gated = lambda y: jax.nn.sigmoid(wide(self.g_proj(x))) * y
      return self.q_proj(x), self.k_proj(x), self.v_proj(x), x, gated, None
    u, z = split_linear(self.in_proj, x, [self.num_heads * self.value_dim] * 2)
    u = u.astype(self.dtype)
    c, conv = self.conv(u, conv, segment_ids)
    q, k, v = self.q_blocks(c), self.k_blocks(c), self.v_blocks(u)
    gated = lambda y: silu_gate(y + wide(self.skip[...]) * wide(c), z)
    return q, k, v, jnp.concatenate([q, k, v], axis=-1), gated, conv

  def _log_gates(self, x):
    """(log i_t, log f_t), [B, T, H], from the inputs of the gates."""
    c = self.gate_soft_cap
    capped = lambda z: z if c is None else c * jnp.tanh(z / c)
    log_i = jnp.clip(capped(self.i_proj(x)), -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return log_i, jax.nn.log_sigmoid(capped(self.f_proj(x)))

  def _log_decays(self, x, state, segment_ids):
    """Those of f_t: what the op is given is for sums whose unit changes from token to token."""
    streams = self._streams(x, None if state is None else state.conv, segment_ids)
    return [self._log_gates(streams[3])[1][..., None]]

  def _mix(self, x, state, segment_ids):
    B, T, _ = x.shape
    before = None if state is None else state.conv
    q, k, v, inputs, gated, conv = self._streams(x, before, segment_ids)
    log_i, log_f = self._log_gates(inputs)
    start = jnp.zeros((B, self.num_heads), log_f.dtype) if state is None else state.stabilizer
    more = segments_of(type(self).__name__, segment_ids, B, T), self.sequence_axis
    _, m, last = _running_maximum(log_f, log_i, start, *more)
    # The op's sums are in units of exp(u), u on a grid where all sums of the maximum are exact:
    # rounded, log f + m_{t-1} - m_t could be above 0. The results do not depend on u.
    above = lambda z: jax.lax.stop_gradient(jnp.ceil(z * _GRID) / _GRID)
    unit = above(start)
    u_before, u, u_last = _running_maximum(above(log_f), above(log_i), unit, *more)

    heads = lambda z: split_heads(z, self.num_heads)
    v = heads(v.astype(self.dtype))
    recurrent = None if state is None else _with_ones(state.recurrent, start - unit)
    y, recurrent = linear_attention(
      heads(q.astype(self.dtype)),
      (jnp.exp(log_i - u)[..., None] * heads(wide(k))).astype(self.dtype),
      jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1),  # the last column of S is n
      log_decay=log_f + (u_before - u),
      **self._place(recurrent, segment_ids),
    )
    y, normalizer = wide(y[..., :-1]), wide(y[..., -1:])
    floor, eps = jnp.exp(-u)[..., None], self.denominator_eps * jnp.exp(m - u)[..., None]
    y = y / (jnp.maximum(jnp.abs(normalizer), floor) + eps)
    y = gated(wide(merge_heads(self.norm.per_head(y))))
    out = self.o_proj(y.astype(self.dtype)).astype(self.dtype)
    kv = recurrent.kv * jnp.exp(u_last - last)[..., None, None]
    return out, MLSTMState(conv, LinearAttentionState(kv[..., :-1], kv[..., -1]), last)


def _check_absent(variant: str, has: str, **options: int | float | None) -> None:
  """Raises `ValueError` for an option of the other variant."""
  for name, value in options.items():
    if value is not None:
      raise ValueError(f"{name}={value!r}: variant={variant!r} has {has}; leave {name} out.")


def _with_ones(state: LinearAttentionState, exponent: jax.Array) -> LinearAttentionState:
  """The state of values with a column of ones, times exp(exponent [B, H])."""
  kv = jnp.concatenate([state.kv, state.key_sum[..., None]], axis=-1)
  return LinearAttentionState(kv * jnp.exp(exponent)[..., None, None], None)


def _running_maximum(decay, x, start, segments, axis_name):
  """m_t = max(decay_t + m_{t-1}, x_t), where 0 stands before a document's first token.

  Args:
    decay, x: [B, T, H].
    start: [B, H], m before the first token of the whole sequence.

  Returns:
    (m_{t-1} [B, T, H], m_t [B, T, H], m after the whole sequence [B, H]).
  """
  before = reach(segments, x)
  sums, m = decay, x
  if segments is not None:
    m = jnp.where(segments.first()[..., None], jnp.maximum(decay, x), x)
  for span in spans(x.shape[1]):
    m = jnp.maximum(m, earlier(m, span, before, -jnp.inf) + sums)
    sums = jnp.maximum(sums + earlier(sums, span, before, 0.0), _LOWEST)  # no maximum is as low
  in_first = True if segments is None else (segments.index == 0)[..., None]
  entering, last = start, None
  if axis_name is not None:
    advance = lambda shard, m: jnp.maximum(m + shard[0], shard[1])
    entering, last = states(axis_name, (sums[:, -1], m[:, -1]), start, advance, segments)
  m = jnp.maximum(m, jnp.where(in_first, entering[:, None] + sums, -jnp.inf))
  previous = jnp.concatenate([entering[:, None], m[:, :-1]], axis=1)
  if segments is not None:
    previous = jnp.where(segments.first()[..., None], 0.0, previous)
  return previous, m, m[:, -1] if last is None else last

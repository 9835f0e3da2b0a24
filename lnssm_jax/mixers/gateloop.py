"""GateLoop: linear attention whose decays depend on the input and are complex."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_call, check_heads, check_positive
from lnssm_jax.mixers.complex_state import ComplexState, empty_state
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.initializers import uniform_fan_in
from lnssm_jax.mixers.layers import (
  linear,
  merge_heads,
  silu_gate,
  smooth_rms_norm,
  split_heads,
  wide,
)
from lnssm_jax.ops import LinearAttentionState, sequence_parallel
from lnssm_jax.ops.sequence_parallel import linear_attention

# 2 pi in two parts. The first has few digits, so that whole turns of it are taken off exactly.
_TURN = (6.28125, 2 * math.pi - 6.28125)


class GateLoop(Divisible):
  r"""Each key channel decays and turns, by a factor and an angle that depend on the input.

      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t
      a_t = sigmoid(W_a x_t + b_a) e^(i (W_p x_t + b_p))               one per key channel, complex
      S_t = diag(a_t) S_{t-1} + k_t v_t^T,      y_t = Re(S_t^T q_t)                  for each head
      out_t = W_o (RMSNorm(y_t) * silu(W_g x_t))                       norm over all D channels

  Computed with real numbers: with the sum of angles p_t, the rotated S'_t = e^(-i p_t) S_t decays
  by |a_t| alone, and its real and imaginary parts are the two halves of one linear attention with
  keys [k cos p, k sin p] and queries [q cos p, q sin p]. Sums of angles are kept within a turn.

  Args:
    dim: D, the width; a multiple of `num_heads`. The width of a head is K = D / H, for keys and
      values; the paper's largest models have D heads of width 1.
    num_heads: H.
    dtype: of the projections and of the rotated q, k and of v; decays, angles, norm, the state and
      sums are float32.
    param_dtype: of the parameters.

  The state is S, [B, H, K, K], its real and its imaginary part. Cutting a sequence anywhere and
  passing it on gives the same result as one call.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Source: GateLoop (Katsch 2023), sections 3.2-3.4. Kernels start uniform within 1 / sqrt(D) and
  b_a, b_p at zero, since the paper gives no values; its norm is not named, and is an RMSNorm with a
  scale here. (The author's later code is another recurrence.)
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.head_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    init = uniform_fan_in(dim)
    projection = lambda: linear(dim, dim, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    self.q_proj, self.k_proj, self.v_proj = projection(), projection(), projection()
    self.a_proj, self.p_proj, self.g_proj = projection(), projection(), projection()
    self.a_bias = nnx.Param(jnp.zeros(dim, param_dtype))
    self.p_bias = nnx.Param(jnp.zeros(dim, param_dtype))
    self.norm_gain = nnx.Param(jnp.ones(dim, param_dtype))
    self.o_proj = projection()

  def init_state(self, batch_size: int) -> ComplexState:
    """The state before the first token: zeros, [B, H, K, K]."""
    B = check_positive("batch_size", batch_size)
    return empty_state(B, self.num_heads, self.head_dim, self.head_dim)

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: ComplexState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, ComplexState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    heads = lambda z: split_heads(z, self.num_heads)
    twice = lambda z, w: jnp.concatenate([z, w], axis=-1)
    log_decay = heads(jax.nn.log_sigmoid(wide(self.a_proj(x)) + wide(self.a_bias[...])))
    angle, last = _angles(wide(self.p_proj(x)) + wide(self.p_bias[...]), self.sequence_axis)
    cos, sin = heads(jnp.cos(angle)), heads(jnp.sin(angle))
    q, k = heads(wide(self.q_proj(x))), heads(wide(self.k_proj(x)))
    # The state before the first token has turned by nothing; of S' the second half is -Im.
    memory = None
    if state is not None:
      memory = LinearAttentionState(jnp.concatenate([state.real, -state.imag], axis=-2), None)
    y, memory = linear_attention(
      twice(q * cos, q * sin).astype(self.dtype),
      twice(k * cos, k * sin).astype(self.dtype),
      heads(self.v_proj(x)),
      log_decay=twice(log_decay, log_decay),
      axis_name=self.sequence_axis,
      initial_state=memory,
      segment_ids=segment_ids,
    )
    real, imag = jnp.split(memory.kv, 2, axis=-2)
    cos, sin = (turn(last).reshape(*real.shape[:-1], 1) for turn in (jnp.cos, jnp.sin))
    state = ComplexState(cos * real + sin * imag, sin * real - cos * imag)
    y = smooth_rms_norm(merge_heads(y), self.norm_gain[...])
    return self.o_proj(silu_gate(y, self.g_proj(x)).astype(self.dtype)), state


def _angles(step: jax.Array, axis_name: str | None) -> tuple[jax.Array, jax.Array]:
  """Sums of `step` [B, T, D] over time, less whole turns: up to each step, and of all, [B, D]."""
  angle = _sums_within_a_turn(step)
  if axis_name is None:
    return angle, angle[:, -1]
  add = lambda a, b: _within_a_turn(a + b)
  nothing = jnp.zeros(angle[:, 0].shape, angle.dtype)
  before, last = sequence_parallel.states(axis_name, angle[:, -1], nothing, add, None)
  return add(angle, before[:, None]), last


def _sums_within_a_turn(angle: jax.Array) -> jax.Array:
  """Sums of `angle` [B, T, ...] over time up to each step, less whole turns."""
  add = lambda a, b: _within_a_turn(a + b)
  return jax.lax.associative_scan(add, _within_a_turn(angle), axis=1)


def _within_a_turn(angle):
  """The angle less whole turns, which cost digits."""
  turns = jnp.round(angle / sum(_TURN))
  return (angle - turns * _TURN[0]) - turns * _TURN[1]

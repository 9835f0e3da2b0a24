"""Log-linear attention: O(log T) states, of spans of the past that double, on Mamba-2's decay."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.export import is_symbolic_dim

from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.capacity import check_capacity, nan_beyond
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.mixers.common.projections import split_heads
from lnssm_jax.mixers.mamba import Mamba2Block
from lnssm_jax.ops import ConvState, LinearAttentionState, linear_attention
from lnssm_jax.ops.core.activations import softplus
from lnssm_jax.ops.core.halo import step_positions
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state


@register_state
class LevelState(NamedTuple):
  """The recurrent state of each level of `LogLinear`."""

  sums: LinearAttentionState  # kv [B, H L, N, P] float32: the L levels of a head side by side
  position: jax.Array  # [B] int32, the number of tokens of the segment so far


@register_state
class LogLinearState(NamedTuple):
  """Recurrent state of `LogLinear`."""

  conv: ConvState  # inputs [B, W - 1, E + 2 G N] float32
  recurrent: LevelState


class LogLinear(Mamba2Block[LogLinearState]):
  r"""Mamba-2 with a weight for each level of a Fenwick tree over the past.

      [z_t, u', dt', w'] = W_in u_t,  and x_t, b_t, c_t, dt_t and the decay as in `Mamba2`
      y_t = sum_l lambda_tl S_tl^T c_t + skip x_t,      lambda_tl = softplus(g_l w'_tl)
      S_tl = sum over tokens s of level l of (decay from s to t) b_s (dt_s x_s)^T      S_tl: [N, P]

  Token t, counted from 0 in its document, is level 0 of itself. An earlier token s is of level l
  if l is the place of the highest binary digit in which t and s differ, counted from 1: the levels
  are spans of 1, 2, 4, ... tokens, nearest first.

  Computed as one linear attention with a head for each level: level l resets its state every 2^l
  tokens, adds tokens in the first half of such a block and is read in the second. The work is
  O(T log T), a decoding step reads L = ceil(log2(max_length)) states.

  Args:
    dim, expand, head_dim, state_dim, num_groups, conv_size, conv_bias: as in `Mamba2`.
    norm_order, norm_eps, num_layers: as in `Mamba2`.
    max_length: the maximum number of tokens of one sequence, which sets the number of levels,
      L + 1. Longer ones are rejected, as in `SoftmaxAttention`.
    use_bias: whether W_in and W_o have biases.
    dtype: of the projections and of x, b times its level's mask, c times lambda; the rest is
      float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: as in `Mamba2`, or `max_length` is below 2.

  Source: Log-Linear Attention (Guo et al. 2025), sections 3.1-3.3; `LogLinearMamba2` of fla:
  conv_bias=False, use_bias=True and max_length=16384 there. Its g (level_weight) starts at 1 and
  its decay rates at 1 ... H; the rest starts as in `Mamba2`.
  """

  name = "log_linear"
  needs_length = True
  recurrence_flops = flops.log_linear
  sharding = ((r"level_weight", ("fsdp", None)),)
  without_weight_decay = (r"level_weight",)

  def __init__(
    self,
    dim: int,
    *,
    max_length: int = 16384,
    expand: int = 2,
    head_dim: int = 64,
    state_dim: int = 128,
    num_groups: int = 1,
    conv_size: int | None = 4,
    use_bias: bool = False,
    conv_bias: bool = True,
    norm_order: str = "gate_first",
    num_layers: int = 1,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.max_length = check_positive("max_length", max_length)
    if max_length < 2:
      raise ValueError(f"max_length={max_length} must be at least 2.")
    self.num_states = (max_length - 1).bit_length()
    self.per_head = (1, self.num_states + 1)
    super().__init__(
      dim,
      expand=expand,
      head_dim=head_dim,
      state_dim=state_dim,
      num_groups=num_groups,
      conv_size=conv_size,
      use_bias=use_bias,
      conv_bias=conv_bias,
      norm_order=norm_order,
      num_layers=num_layers,
      norm_eps=norm_eps,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    H = self.num_heads
    self.log_rate = nnx.Param(jnp.log(jnp.arange(1.0, H + 1)).astype(param_dtype))
    self.level_weight = nnx.Param(jnp.ones((H, self.num_states + 1), param_dtype))

  def _init_state(self, B):
    sums = jnp.zeros(
      (B, self.num_heads * self.num_states, self.state_dim, self.head_dim), jnp.float32
    )
    state = LevelState(LinearAttentionState(sums, None), jnp.zeros(B, jnp.int32))
    return LogLinearState(self.conv.init_state(B), state)

  def _mix(self, x, state, segment_ids):
    out, conv, recurrent = self._run(x, state, segment_ids)
    return out, LogLinearState(conv, recurrent)

  def _log_decays(self, x, state, segment_ids):
    """Mamba-2's: a reset, after which the tokens are those of another level, is no decay."""
    (of_each,) = super()._log_decays(x, state, segment_ids)
    last = of_each.shape[2] // self.num_heads - 1  # the highest level is never reset
    return [of_each[:, :, last :: last + 1]]

  def _recurrence(self, q, k, v, log_decay, state, segment_ids, *more):
    (weights,) = more
    (B, T, H), axis = log_decay.shape, self.sequence_axis
    before = None if state is None else state.position
    check_capacity(type(self).__name__, T, before, segment_ids, self.max_length, axis)
    position, length = step_positions(B, T, segment_ids, before, axis_name=axis)
    count = self._levels(T) if state is None else self.num_states

    level, token = jnp.arange(count), position[..., None]
    reads = (token >> level) & 1  # [B, T, L]
    resets = (token & ((2 << level) - 1) == 0) & (token > 0)
    weights = softplus(wide(self.level_weight[...]) * wide(split_heads(weights, H)))
    q, k = (jnp.repeat(z, H // z.shape[2], axis=2) for z in (q, k))
    of_levels = lambda z, weight: (weight[..., None] * wide(z)[:, :, :, None]).astype(self.dtype)
    flat = lambda z: z.reshape(B, T, H * count, *z.shape[4:])
    out, sums = linear_attention(
      flat(of_levels(q, weights[..., 1 : count + 1] * reads[:, :, None])),
      flat(of_levels(k, jnp.broadcast_to(1 - reads[:, :, None], (B, T, H, count)))),
      v,
      log_decay=flat(jnp.where(resets[:, :, None], -jnp.inf, log_decay[..., None])),
      scale=1.0,
      **self._place(None if state is None else state.sums, segment_ids),
    )
    y = jnp.sum(wide(out).reshape(B, T, H, count, self.head_dim), axis=3)
    own = weights[..., 0] * jnp.sum(wide(q) * wide(k), axis=-1)
    y = nan_beyond(y + own[..., None] * wide(v), position, self.max_length)
    kv = sums.kv.reshape(B, H, count, *sums.kv.shape[2:])
    # Levels above these have seen the same: all tokens.
    kv = jnp.concatenate([kv] + [kv[:, :, -1:]] * (self.num_states - count), axis=2)
    sums = LinearAttentionState(kv.reshape(B, H * self.num_states, *kv.shape[3:]), None)
    return y.astype(self.dtype), LevelState(sums, length)

  def _levels(self, T):
    """The levels of a sequence from its start, and one above them, that all tokens are in."""
    if is_symbolic_dim(T):
      return self.num_states
    T *= 1 if self.sequence_axis is None else jax.lax.axis_size(self.sequence_axis)
    return min(self.num_states, (T - 1).bit_length() + 1)

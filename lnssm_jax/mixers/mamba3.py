"""Mamba-3: scalar decays, a trapezoidal update, data-dependent rotations; SISO and MIMO."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.angles import chunk_angles
from lnssm_jax.mixers.common.checks import (
  check_choice,
  check_finite,
  check_groups,
  check_positive,
)
from lnssm_jax.mixers.common.initializers import step_size_bias, uniform_fan_in
from lnssm_jax.mixers.common.norms import RMSNorm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads, split_linear
from lnssm_jax.ops import LinearAttentionState, linear_attention
from lnssm_jax.ops.core.activations import softplus
from lnssm_jax.ops.core.halo import of_first, of_last, of_next
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.segments import segments_of
from lnssm_jax.ops.core.states import register_state
from lnssm_jax.ops.rotations.api import rotations
from lnssm_jax.ops.rotations.reference import rotated
from lnssm_jax.ops.rotations.types import Inputs as Rotations

# What weighs less is nothing in any sum, but the square of a weight must not be 0 in float32.
_SMALLEST_WEIGHT = 1e-18
RATES = {
  "softplus": softplus,
  "heavy_tail": lambda x: jnp.maximum(x, 0) + 1 / (1 - jnp.minimum(x, 0)),
}


@register_state
class Mamba3State(NamedTuple):
  """Recurrent state of `Mamba3`, float32."""

  recurrent: LinearAttentionState  # kv [B, H, N, P]
  key: jax.Array  # [B, H, R, N], k of the last token, rotated
  value: jax.Array  # [B, H, P], v of the last token
  angle: jax.Array  # [B, H, A], modulo whole turns


class Mamba3(Mixer[Mamba3State]):
  r"""The Mamba-3 block: H heads of width P, E = expand D = H P, without a convolution.

      [z_t, v_t, b_t, c_t, dt', a', l', p'] = W_in u_t
      dt_t = softplus(dt' + dt_bias),  g_t = -max(rate(a'), decay_floor) dt_t          per head
      l_t = sigmoid(l')                                  how much of the step its end counts
      k_t = R_t (RMSNorm(b_t) + b_offset),  q_t = R_t (RMSNorm(c_t) + c_offset)
      S_t = e^(g_t) (S_{t-1} + (1 - l_t) dt_t k_{t-1} v_{t-1}^T) + l_t dt_t k_t v_t^T
      y_t = S_t^T q_t + skip v_t,      out_t = W_o (y_t * silu(z_t))                   S: [N, P]

  R_t rotates pairs of channels by the sums of tanh(p') pi dt_t over the tokens so far. b and c are
  shared by all heads, or by those of one of G groups; their biases are not.

  With mimo_rank R, b_t and c_t are R vectors, and each of them has v_t and z_t times a vector of
  its own: S_t adds the R products of keys and values, out_t = W_o sum_r o_r y_tr silu(z_tr).

  Computed as one linear attention: a token adds its key once, times w_t = l_t dt_t +
  (1 - l_{t+1}) dt_{t+1} if another follows, of which l_t dt_t count in its own output.

  Args:
    dim: D, the width.
    expand: E / D.
    head_dim: P; a divisor of E.
    state_dim: N, the width of b and c.
    num_groups: G, a divisor of H ("ngroups").
    mimo_rank: R; None for one input and one output per head (SISO), without the vectors above.
    rotary_fraction: the share of the N channels that rotates, 0.5 or 1.0 ("rope_fraction").
    decay_rate: rate(a'): "softplus", or "heavy_tail" for 1 + a' of a' >= 0, else 1 / (1 - a').
    decay_floor: the least rate of the decay ("A_floor").
    output_norm: whether y_t is normalized, per head, before the gate ("is_outproj_norm").
    use_bias: whether W_in and W_o have biases.
    norm_eps: eps of the norms, under the root.
    num_layers: of the model; W_o starts as that of a linear layer, divided by sqrt(num_layers).
    dtype: of the projections, of the rotated q and k and of v; steps, decays, angles, norms, state
      and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size does not fit, no pair of channels would rotate, or an option is unknown.

  Source: Mamba-3 (Lahoti et al. 2026) and its published code, `Mamba3` of mamba-ssm 2.3.2
  (later commits have "heavy_tail"), which pairs neighboring channels where this class has
  (i, i + A), A pairs. dt_bias is that of dt log-uniform
  between 0.001 and 0.1; biases of b and c, skip and the vectors of z start at 1, those of v and of
  the outputs at 1 / R. W_in and W_o start uniform within 1 / sqrt(inputs).
  """

  name = "mamba3"
  needs_length = True
  set_by_model = ("num_layers",)
  sharding = ((r"mimo_[vzo]|[bc]_offset", (None, None, "fsdp")),)  # [H, R, width]
  recomputes = True
  recurrence_flops = flops.mimo

  def __init__(
    self,
    dim: int,
    *,
    expand: int = 2,
    head_dim: int = 64,
    state_dim: int = 128,
    num_groups: int = 1,
    mimo_rank: int | None = None,
    rotary_fraction: float = 0.5,
    decay_rate: str = "softplus",
    decay_floor: float = 1e-4,
    output_norm: bool = False,
    use_bias: bool = False,
    norm_eps: float = 1e-5,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.inner_dim = E = check_positive("expand", expand) * dim
    self.head_dim, self.num_heads = check_positive("head_dim", head_dim), E // head_dim
    if E % head_dim:
      raise ValueError(
        f"head_dim={head_dim} does not divide expand * dim = {E}; use head_dim="
        f"{math.gcd(E, head_dim)}, or another dim."
      )
    H, P, N = self.num_heads, head_dim, check_positive("state_dim", state_dim)
    self.state_dim, self.num_groups = N, check_groups("num_groups", num_groups, H)
    self.rank = R = 1 if mimo_rank is None else check_positive("mimo_rank", mimo_rank)
    self.num_angles = int(check_choice("rotary_fraction", rotary_fraction, (0.5, 1.0)) * N) // 2
    if self.num_angles == 0:
      raise ValueError(
        f"state_dim={N} and rotary_fraction={rotary_fraction} leave no pair of channels to rotate; "
        "use a larger state_dim."
      )
    self.decay_rate = check_choice("decay_rate", decay_rate, RATES)
    self.decay_floor = check_finite("decay_floor", decay_floor, least=0)
    check_positive("num_layers", num_layers)

    def linear(inputs, outputs, gain=1.0):
      init, bias_init = uniform_fan_in(inputs, gain=gain), "zeros" if use_bias else None
      options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
      return Linear(inputs, outputs, kernel_init=init, bias_init=bias_init, **options)

    bc = self.num_groups * R * N
    self.widths = (E, E, bc, bc, H, H, H, self.num_angles)
    self.in_proj = linear(dim, sum(self.widths))
    self.dt_bias = nnx.Param(step_size_bias(rngs.params(), (H,), param_dtype))
    constant = lambda value, *shape: nnx.Param(jnp.full(shape, value, param_dtype))
    self.b_offset, self.c_offset = constant(1.0, H, R, N), constant(1.0, H, R, N)
    norm = lambda width: RMSNorm(width, eps=norm_eps, param_dtype=param_dtype)
    self.b_norm, self.c_norm = norm(N), norm(N)
    of_rank = lambda value: None if mimo_rank is None else constant(value, H, R, P)
    self.mimo_v, self.mimo_z, self.mimo_o = of_rank(1 / R), of_rank(1.0), of_rank(1 / R)
    self.skip = constant(1.0, H)
    self.norm = norm(E) if output_norm else None
    self.o_proj = linear(E, dim, num_layers**-0.5)

  def _init_state(self, B):
    H, N, P = self.num_heads, self.state_dim, self.head_dim
    zeros = lambda *shape: jnp.zeros((B, H, *shape), jnp.float32)
    recurrent = LinearAttentionState(zeros(N, P), None)
    return Mamba3State(recurrent, zeros(self.rank, N), zeros(P), zeros(self.num_angles))

  def _of_rank(self, x, vectors):
    """[..., H, P] -> [..., R, H, P]: x times each of its head's vectors."""
    x = wide(x)[..., None, :, :]
    return x if vectors is None else x * wide(vectors[...]).swapaxes(0, 1)

  def _normalized(self, x, norm):
    """b or c [B, T, R G N] -> [B, T, R, G, N]."""
    R, G, N = self.rank, self.num_groups, self.state_dim
    return norm(x.reshape(*x.shape[:2], R * G, N)).reshape(*x.shape[:2], R, G, N)

  def _mix(self, x, state, segment_ids):
    B, T, _ = x.shape
    H, axis = self.num_heads, self.sequence_axis
    z, v, b, c, dt, rate, share, angle = split_linear(self.in_proj, x, self.widths)
    z, v = split_heads(z, H), split_heads(v.astype(self.dtype), H)
    dt = softplus(wide(dt) + wide(self.dt_bias[...]))  # [B, T, H], as the next three
    log_decay = -jnp.maximum(RATES[self.decay_rate](wide(rate)), self.decay_floor) * dt
    share = jax.nn.sigmoid(wide(share))
    now, next_token = share * dt, (1 - share) * dt  # of a token in its own step and in the next
    pace = math.pi * jnp.tanh(wide(angle))
    segments = segments_of(type(self).__name__, segment_ids, B, T)
    start = None if state is None else state.angle
    angles = chunk_angles(pace, dt, start, segments, axis)

    first, after = next_token[:, 0], jnp.zeros_like(next_token[:, 0])
    if axis is not None:
      first, after = of_first(first, axis_name=axis), of_next(first, axis_name=axis)
    weight = now + jnp.concatenate([next_token[:, 1:], after[:, None]], axis=1)
    b, c = self._normalized(b, self.b_norm), self._normalized(c, self.c_norm)
    inputs = Rotations(
      keys=b,
      queries=c,
      key_offset=self.b_offset[...],
      query_offset=self.c_offset[...],
      pace=pace,
      step=dt,
      weight=weight,
      entering=angles.entering,
      keep=angles.keep,
    )
    k, q = rotations(inputs, dtype=self.dtype)
    out, recurrent = linear_attention(
      q,  # [B, T, R, H, N]
      k,
      self._of_rank(v, self.mimo_v).astype(self.dtype),
      log_decay=log_decay,
      own_weight=now / jnp.maximum(weight, _SMALLEST_WEIGHT),
      scale=1.0,
      **self._place(None if state is None else self._entering(state, first), segment_ids),
    )
    out = self.o_proj(self._gated(out, v, z)).astype(self.dtype)
    key, value = rotated(b[:, -1], inputs.key_offset, angles.last), wide(v)[:, -1]
    if axis is not None:
      key, value = of_last((key, value), axis_name=axis)
    return out, Mamba3State(recurrent, key.swapaxes(1, 2), value, angles.last)

  def _entering(self, state, weight):
    """The state [B, H, N, P] before a token that weights the one before it by weight [B, H]."""
    values = self._of_rank(state.value, self.mimo_v).swapaxes(1, 2)
    added = (weight[..., None, None] * state.key)[..., None] * values[..., None, :]
    return LinearAttentionState(state.recurrent.kv + jnp.sum(added, axis=2), None)

  def _gated(self, out, v, z):
    """[B, T, E] of the op's output [B, T, R, H, P], v and z [B, T, H, P]."""
    # As narrow as they are in memory, and before one is used: see `silu_gate`.
    out, v, z = jax.lax.optimization_barrier((out, v, z))
    y = wide(out) + wide(self.skip[...])[:, None] * self._of_rank(v, self.mimo_v)
    z = self._of_rank(z, self.mimo_z)
    y = y * jax.nn.silu(z) if self.norm is None else self.norm.per_head(y, gate=z)
    if self.mimo_o is None:
      return merge_heads(y[:, :, 0]).astype(self.dtype)
    y = jnp.einsum("btrhp,hrp->bthp", wide(y), wide(self.mimo_o[...]))
    return merge_heads(y).astype(self.dtype)

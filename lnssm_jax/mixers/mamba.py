"""Selective state spaces: Mamba (S6) and Mamba-2 (SSD), each the whole block of its paper."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common.activations import silu_gate
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.mixers.common.initializers import step_size_bias, uniform_fan_in
from lnssm_jax.mixers.common.norms import RMSNorm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads, split_linear
from lnssm_jax.mixers.common.short_convolution import ShortConvolution
from lnssm_jax.ops import (
  ConvState,
  LinearAttentionState,
  SelectiveState,
  linear_attention,
  selective_scan,
)
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state


class SelectiveBlock[State](Mixer[State]):
  """The block of Mamba around a recurrence of N numbers per channel, E = expand D channels wide.

      [x', z_t] = W_in u_t,      x_t = silu(conv(x'))             over W tokens, per channel
      [r, b_t, c_t] = W_x x_t,   a gate per channel from r
      out_t = W_o (silu(z_t) * y_t)                               y_t with skip * x_t

  Subclasses create the projection of the gate in `_gate_projection` and write the recurrence.

  Args:
    dim: D, the width of input and output.
    expand: E / D.
    state_dim: N, the state's width per channel.
    conv_size: W.
    gate_rank: the width of r; None means D / 16, rounded up.
    num_layers: of the model; W_o starts as that of a linear layer, divided by sqrt(num_layers).
    dtype: of the projections and of x, b, c; the gate, decays, state and sums are float32.
    param_dtype: of the parameters.

  Projections start uniform within 1 / sqrt(inputs), skip at 1.
  """

  set_by_model = ("num_layers",)

  def __init__(
    self,
    dim: int,
    *,
    expand: int = 2,
    state_dim: int = 16,
    conv_size: int = 4,
    gate_rank: int | None = None,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.inner_dim = E = check_positive("expand", expand) * dim
    self.state_dim = N = check_positive("state_dim", state_dim)
    gate_rank = -(-dim // 16) if gate_rank is None else gate_rank
    self.gate_rank = check_positive("gate_rank", gate_rank)
    check_positive("num_layers", num_layers)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

    def linear(inputs, outputs, gain=1.0, **more):
      init = uniform_fan_in(inputs, gain=gain)
      return Linear(inputs, outputs, kernel_init=init, **more, **options)

    self.in_proj = linear(dim, 2 * E)
    self.conv = ShortConvolution(E, conv_size, activation="silu", **options)
    self.x_proj = linear(E, gate_rank + 2 * N)
    self._gate_projection(functools.partial(linear, gate_rank, E))
    self.skip = nnx.Param(jnp.ones(E, param_dtype))
    self.o_proj = linear(E, dim, num_layers**-0.5)

  def _gate_projection(self, linear) -> None:
    """Creates the projection of r; `linear(**options)` makes a `Linear` of its size."""
    raise NotImplementedError

  def _streams(self, u, conv, segment_ids):
    """Returns x, z [B, T, E], r [B, T, gate_rank], b, c [B, T, N] and the convolution's state."""
    x, z = split_linear(self.in_proj, u, [self.inner_dim] * 2)
    x, conv = self.conv(x, conv, segment_ids)
    rank, N = self.gate_rank, self.state_dim
    r, b, c = jnp.split(self.x_proj(x), [rank, rank + N], axis=-1)
    return x, z, r, b, c, conv

  def _output(self, y, z):
    return self.o_proj(silu_gate(y, z).astype(self.dtype))


@register_state
class MambaState(NamedTuple):
  """Recurrent state of `Mamba`, float32."""

  conv: ConvState  # inputs [B, W - 1, E]
  recurrent: SelectiveState  # h [B, E, N]


class Mamba(SelectiveBlock[MambaState]):
  r"""The Mamba block: a selective scan between a convolution and a gate, E = expand D wide.

      [x', z_t] = W_in u_t,      x_t = silu(conv(x'))             over W tokens, per channel
      [r, b_t, c_t] = W_x x_t,      dt_t = softplus(W_dt r + b_dt)
      S_t = exp(dt_t A) * S_{t-1} + (dt_t x_t) b_t^T              S: [E, N], A = -exp(a_log)
      out_t = W_o (silu(z_t) * (S_t c_t + skip * x_t))

  Initially A_n = -n in each channel, dt is log-uniform between 0.001 and 0.1, skip = 1.

  Args:
    dim: D, the width of input and output.
    expand: E / D.
    state_dim: N, the state's width per channel.
    conv_size: W.
    gate_rank: the width of r ("dt_rank" in mamba-ssm); None means D / 16, rounded up.
    num_layers: of the model; W_o starts as that of a linear layer, divided by sqrt(num_layers).
    dtype: of the projections and of x; dt, A, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive.

  Source: Mamba (Gu and Dao 2023), Algorithm 2 and section 3.4; initialization as in section 3.6 and
  its published code. The projections without a rule of their own start uniform within
  1 / sqrt(inputs).
  """

  def _gate_projection(self, linear):
    self.dt_proj = linear(bias_init=step_size_bias)
    a_log = jnp.broadcast_to(
      jnp.log(jnp.arange(1.0, self.state_dim + 1)), (self.inner_dim, self.state_dim)
    )
    self.a_log = nnx.Param(a_log.astype(self.dt_proj.param_dtype))

  def _init_state(self, B):
    h = jnp.zeros((B, self.inner_dim, self.state_dim), jnp.float32)
    return MambaState(self.conv.init_state(B), SelectiveState(h))

  def _mix(self, x, state, segment_ids):
    conv, recurrent = state if state is not None else (None, None)
    x, z, r, b, c, conv = self._streams(x, conv, segment_ids)
    y, recurrent = selective_scan(
      x,
      jax.nn.softplus(self.dt_proj(r)),
      -jnp.exp(wide(self.a_log[...])),
      b,
      c,
      skip=self.skip[...],
      axis_name=self.sequence_axis,
      initial_state=recurrent,
      segment_ids=segment_ids,
    )
    return self._output(y, z), MambaState(conv, recurrent)


@register_state
class Mamba2State(NamedTuple):
  """Recurrent state of `Mamba2`, float32."""

  conv: ConvState  # inputs [B, W - 1, E + 2 N]
  recurrent: LinearAttentionState  # kv [B, H, N, P]


class Mamba2(Mixer[Mamba2State]):
  r"""The Mamba-2 block: H heads of width P, one decay per token and head, E = expand D = H P.

      [z_t, u', dt'] = W_in u_t,      [x_t, b_t, c_t] = silu(conv(u'))    over W tokens, per channel
      dt_t = softplus(dt' + dt_bias)                                      per head
      S_t = exp(dt_t A) S_{t-1} + b_t (dt_t x_t)^T                        S: [N, P], A < 0 per head
      y_t = S_t^T c_t + skip x_t,      out_t = W_o RMSNorm(y_t * silu(z_t))

  b and c are shared by all heads. A = -exp(log_rate) is a parameter; the decay is data-dependent
  through dt. Initially -A is uniform between 1 and 16, dt log-uniform between 0.001 and 0.1,
  skip = 1.

  Args:
    dim: D, the width of input and output.
    expand: E / D.
    head_dim: P; a divisor of E.
    state_dim: N, the width of b and c.
    conv_size: W.
    num_layers: of the model; W_o starts as that of a linear layer, divided by sqrt(num_layers).
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of x, b, c; dt, decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, or `head_dim` does not divide E.

  Source: Mamba-2 (Dao and Gu 2024), section 7.1; initialization as in its published code. The
  projections without a rule of their own start uniform within 1 / sqrt(inputs).
  """

  set_by_model = ("num_layers",)

  def __init__(
    self,
    dim: int,
    *,
    expand: int = 2,
    head_dim: int = 64,
    state_dim: int = 128,
    conv_size: int = 4,
    num_layers: int = 1,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.inner_dim = E = check_positive("expand", expand) * dim
    self.head_dim = check_positive("head_dim", head_dim)
    self.state_dim = N = check_positive("state_dim", state_dim)
    check_positive("num_layers", num_layers)
    if E % head_dim:
      raise ValueError(
        f"head_dim={head_dim} does not divide expand * dim = {E}; use head_dim="
        f"{math.gcd(E, head_dim)}, or another dim."
      )
    self.num_heads = H = E // head_dim
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

    def linear(inputs, outputs, gain=1.0):
      return Linear(inputs, outputs, kernel_init=uniform_fan_in(inputs, gain=gain), **options)

    self.in_proj = linear(dim, 2 * E + 2 * N + H)
    self.conv = ShortConvolution(E + 2 * N, conv_size, activation="silu", **options)
    self.dt_bias = nnx.Param(step_size_bias(rngs.params(), (H,), param_dtype))
    rate = jax.random.uniform(rngs.params(), (H,), jnp.float32, 1.0, 16.0)
    self.log_rate = nnx.Param(jnp.log(rate).astype(param_dtype))
    self.skip = nnx.Param(jnp.ones(H, param_dtype))
    self.norm = RMSNorm(E, eps=norm_eps, param_dtype=param_dtype)
    self.o_proj = linear(E, dim, num_layers**-0.5)

  def _init_state(self, B):
    kv = jnp.zeros((B, self.num_heads, self.state_dim, self.head_dim), jnp.float32)
    return Mamba2State(self.conv.init_state(B), LinearAttentionState(kv, None))

  def _mix(self, x, state, segment_ids):
    B, T, _ = x.shape
    E, N, H = self.inner_dim, self.state_dim, self.num_heads
    conv, recurrent = state if state is not None else (None, None)
    z, inner, dt = split_linear(self.in_proj, x, [E, E + 2 * N, H])
    inner, conv = self.conv(inner, conv, segment_ids)
    inner, b, c = jnp.split(inner, [E, E + N], axis=-1)

    dt = jax.nn.softplus(wide(dt) + wide(self.dt_bias[...]))
    inner = split_heads(inner, H)  # [B, T, H, P]
    shared = lambda z: jnp.broadcast_to(z[:, :, None], (B, T, H, N)).astype(self.dtype)
    y, recurrent = linear_attention(
      shared(c),
      shared(b),
      (dt[..., None] * inner).astype(self.dtype),
      log_decay=-jnp.exp(wide(self.log_rate[...])) * dt,
      scale=1.0,
      axis_name=self.sequence_axis,
      initial_state=recurrent,
      segment_ids=segment_ids,
    )
    y = wide(y) + wide(self.skip[...])[:, None] * inner
    y = self.norm(merge_heads(y), gate=z, gate_first=True, dtype=self.dtype)
    return self.o_proj(y), Mamba2State(conv, recurrent)

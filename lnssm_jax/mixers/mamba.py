"""Selective state spaces: Mamba (S6) and Mamba-2 (SSD), each the whole block of its paper."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_call, check_positive
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.initializers import step_size_bias, uniform_fan_in
from lnssm_jax.mixers.layers import (
  linear,
  linear_parts,
  merge_heads,
  silu_gate,
  smooth_rms_norm,
  split_heads,
  wide,
)
from lnssm_jax.mixers.short_convolution import ShortConvolution
from lnssm_jax.ops import LinearAttentionState, SelectiveState
from lnssm_jax.ops.sequence_parallel import linear_attention, selective_scan


class MambaState(NamedTuple):
  """What a layer remembers of a sequence. float32."""

  conv: jax.Array  # [B, W - 1, E], the last inputs of the convolution
  memory: SelectiveState  # ssm [B, E, N]


class Mamba(Divisible):
  r"""The Mamba block: a selective scan between a convolution and a gate, E = expand D wide.

      [x', z_t] = W_in u_t,      x_t = silu(conv(x'))             over W steps, per channel
      [delta, b_t, c_t] = W_x x_t,      dt_t = softplus(W_dt delta + dt_bias)
      S_t = exp(dt_t A) * S_{t-1} + (dt_t x_t) b_t^T              S: [E, N], A = -exp(a_log)
      out_t = W_o (silu(z_t) * (S_t c_t + skip * x_t))

  Initially A_n = -n in each channel, dt is log-uniform between 0.001 and 0.1, skip = 1.

  Args:
    dim: D, the width of input and output.
    expand: E / D.
    state_dim: N, numbers remembered per channel.
    conv_width: W.
    step_rank: the width of delta; None means D / 16, rounded up.
    num_layers: of the model; W_o starts as that of a linear layer, divided by sqrt(num_layers).
    dtype: of the projections and of x; dt, A, the state and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Raises:
    ValueError: a size is not positive.

  Source: Mamba (Gu and Dao 2023), Algorithm 2 and section 3.4; initialisation as in section 3.6 and
  its published code. The projections without a rule of their own start uniform within
  1 / sqrt(inputs).
  """

  def __init__(
    self,
    dim: int,
    *,
    expand: int = 2,
    state_dim: int = 16,
    conv_width: int = 4,
    step_rank: int | None = None,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.inner_dim = check_positive("expand", expand) * dim
    self.state_dim = check_positive("state_dim", state_dim)
    rank = -(-dim // 16) if step_rank is None else check_positive("step_rank", step_rank)
    check_positive("num_layers", num_layers)
    self.step_rank = rank
    E, N = self.inner_dim, state_dim

    def projection(inputs, outputs, gain=1.0):
      init = uniform_fan_in(inputs, gain=gain)
      return linear(inputs, outputs, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    self.in_proj = projection(dim, 2 * E)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.conv = ShortConvolution(E, conv_width, activation="silu", **options)
    self.x_proj = projection(E, rank + 2 * N)
    self.dt_proj = projection(rank, E)
    self.dt_bias = nnx.Param(step_size_bias(rngs.params(), E).astype(param_dtype))
    a_log = jnp.broadcast_to(jnp.log(jnp.arange(1.0, N + 1)), (E, N))
    self.a_log = nnx.Param(a_log.astype(param_dtype))
    self.skip = nnx.Param(jnp.ones(E, param_dtype))
    self.o_proj = projection(E, dim, num_layers**-0.5)

  def init_state(self, batch_size: int) -> MambaState:
    """The state before the first token: zeros."""
    B = check_positive("batch_size", batch_size)
    memory = SelectiveState(jnp.zeros((B, self.inner_dim, self.state_dim), jnp.float32))
    return MambaState(conv=self.conv.init_state(B), memory=memory)

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: MambaState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, MambaState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    conv, memory = state if state is not None else (None, None)
    inner, gate = linear_parts(self.in_proj, x, [self.inner_dim] * 2)
    inner, conv = self.conv(inner, conv, segment_ids)

    rank, N = self.step_rank, self.state_dim
    step, b, c = jnp.split(self.x_proj(inner), [rank, rank + N], axis=-1)
    step = wide(self.dt_proj(step)) + wide(self.dt_bias[...])
    y, memory = selective_scan(
      inner,
      jax.nn.softplus(step),
      -jnp.exp(wide(self.a_log[...])),
      b,
      c,
      skip=self.skip[...],
      axis_name=self.sequence_axis,
      initial_state=memory,
      segment_ids=segment_ids,
    )
    return self.o_proj(silu_gate(y, gate).astype(self.dtype)), MambaState(conv, memory)


class Mamba2State(NamedTuple):
  """What a layer remembers of a sequence. float32."""

  conv: jax.Array  # [B, W - 1, E + 2 N], the last inputs of the convolution
  memory: LinearAttentionState  # kv [B, H, N, P]


class Mamba2(Divisible):
  r"""The Mamba-2 block: H heads of width P with one decay per step and head, E = expand D = H P.

      [z_t, u', dt'] = W_in u_t,      [x_t, b_t, c_t] = silu(conv(u'))    over W steps, per channel
      dt_t = softplus(dt' + dt_bias)                                      one number per head
      S_t = exp(dt_t A) S_{t-1} + b_t (dt_t x_t)^T                        S: [N, P], A < 0 per head
      y_t = S_t^T c_t + skip x_t,      out_t = W_o RMSNorm(y_t * silu(z_t))

  b and c are shared by all heads. A = -exp(log_rate) is a parameter, but the decay depends on the
  input through dt. Initially -A is uniform between 1 and 16, dt log-uniform between 0.001 and 0.1,
  skip = 1.

  Args:
    dim: D, the width of input and output.
    expand: E / D.
    head_dim: P; a divisor of E.
    state_dim: N, the width of b and c.
    conv_width: W.
    num_layers: of the model; W_o starts as that of a linear layer, divided by sqrt(num_layers).
    dtype: of the projections and of x, b, c; dt, decays, norm, the state and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Raises:
    ValueError: a size is not positive, or `head_dim` does not divide E.

  Source: Mamba-2 (Dao and Gu 2024), section 7.1; initialisation as in its published code. The
  projections without a rule of their own start uniform within 1 / sqrt(inputs).
  """

  def __init__(
    self,
    dim: int,
    *,
    expand: int = 2,
    head_dim: int = 64,
    state_dim: int = 128,
    conv_width: int = 4,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.inner_dim = check_positive("expand", expand) * dim
    self.head_dim = check_positive("head_dim", head_dim)
    self.state_dim = check_positive("state_dim", state_dim)
    check_positive("num_layers", num_layers)
    E, N = self.inner_dim, state_dim
    if E % head_dim:
      raise ValueError(
        f"head_dim={head_dim} does not divide expand * dim = {E}; use head_dim="
        f"{math.gcd(E, head_dim)}, or another dim."
      )
    self.num_heads = H = E // head_dim

    def projection(inputs, outputs, gain=1.0):
      init = uniform_fan_in(inputs, gain=gain)
      return linear(inputs, outputs, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    self.in_proj = projection(dim, 2 * E + 2 * N + H)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.conv = ShortConvolution(E + 2 * N, conv_width, activation="silu", **options)
    self.dt_bias = nnx.Param(step_size_bias(rngs.params(), H).astype(param_dtype))
    rate = jax.random.uniform(rngs.params(), (H,), jnp.float32, 1.0, 16.0)
    self.log_rate = nnx.Param(jnp.log(rate).astype(param_dtype))
    self.skip = nnx.Param(jnp.ones(H, param_dtype))
    self.norm_gain = nnx.Param(jnp.ones(E, param_dtype))
    self.o_proj = projection(E, dim, num_layers**-0.5)

  def init_state(self, batch_size: int) -> Mamba2State:
    """The state before the first token: zeros."""
    B = check_positive("batch_size", batch_size)
    kv = jnp.zeros((B, self.num_heads, self.state_dim, self.head_dim), jnp.float32)
    return Mamba2State(conv=self.conv.init_state(B), memory=LinearAttentionState(kv, None))

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: Mamba2State | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, Mamba2State]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    B, T, _ = x.shape
    E, N, H = self.inner_dim, self.state_dim, self.num_heads
    conv, memory = state if state is not None else (None, None)
    gate, inner, step = linear_parts(self.in_proj, x, [E, E + 2 * N, H])
    inner, conv = self.conv(inner, conv, segment_ids)
    inner, b, c = jnp.split(inner, [E, E + N], axis=-1)

    step = jax.nn.softplus(wide(step) + wide(self.dt_bias[...]))
    inner = split_heads(inner, H)  # [B, T, H, P]
    shared = lambda z: jnp.broadcast_to(z[:, :, None], (B, T, H, N)).astype(self.dtype)
    y, memory = linear_attention(
      shared(c),
      shared(b),
      (step[..., None] * inner).astype(self.dtype),
      log_decay=-jnp.exp(wide(self.log_rate[...])) * step,
      axis_name=self.sequence_axis,
      initial_state=memory,
      segment_ids=segment_ids,
    )
    y = wide(y) + wide(self.skip[...])[:, None] * inner
    y = smooth_rms_norm(silu_gate(merge_heads(y), gate), self.norm_gain[...])
    return self.o_proj(y.astype(self.dtype)), Mamba2State(conv, memory)

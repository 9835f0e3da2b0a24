"""Selective state spaces: Mamba (S6) and Mamba-2 (SSD), each the whole block of its paper."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.activations import silu_gate
from lnssm_jax.mixers.common.checks import (
  check_choice,
  check_groups,
  check_norm_eps,
  check_positive,
  check_width,
)
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
from lnssm_jax.ops.core.activations import softplus
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state

INNER_NORMS = ("none", "rms", "scaled_rms")
NORM_ORDERS = ("gate_first", "norm_first", "none")


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
    conv_size: W; None leaves the convolution out.
    gate_rank: the width of r; None means D / 16, rounded up.
    use_bias, conv_bias: whether W_in and W_o, and the convolution, have biases.
    inner_norm: of r, b and c, before they are used: "none", "rms" (without scale) or "scaled_rms".
    norm_eps: eps of these, under the root.
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
    conv_size: int | None = 4,
    gate_rank: int | None = None,
    use_bias: bool = False,
    conv_bias: bool = True,
    inner_norm: str = "none",
    norm_eps: float = 1e-6,
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

    bias_init = "zeros" if use_bias else None
    self.in_proj = linear(dim, 2 * E, bias_init=bias_init)
    self.conv = ShortConvolution(E, conv_size, use_bias=conv_bias, activation="silu", **options)
    self.x_proj = linear(E, gate_rank + 2 * N)
    self._gate_projection(functools.partial(linear, gate_rank, E))
    self.skip = nnx.Param(jnp.ones(E, param_dtype))
    self.o_proj = linear(E, dim, num_layers**-0.5, bias_init=bias_init)
    has_norms = check_choice("inner_norm", inner_norm, INNER_NORMS) != "none"
    norm = {"eps": norm_eps, "use_scale": inner_norm == "scaled_rms", "param_dtype": param_dtype}
    norms = [RMSNorm(n, **norm) if has_norms else None for n in (gate_rank, N, N)]
    self.r_norm, self.b_norm, self.c_norm = norms

  def _gate_projection(self, linear) -> None:
    """Creates the projection of r; `linear(**options)` makes a `Linear` of its size."""
    raise NotImplementedError

  def _streams(self, u, conv, segment_ids):
    """Returns x, z [B, T, E], r [B, T, gate_rank], b, c [B, T, N] and the convolution's state."""
    x, z = split_linear(self.in_proj, u, [self.inner_dim] * 2)
    x, conv = self.conv(x.astype(self.dtype), conv, segment_ids)
    rank, N = self.gate_rank, self.state_dim
    r, b, c = jnp.split(self.x_proj(x), [rank, rank + N], axis=-1)
    norms = (self.r_norm, self.b_norm, self.c_norm)
    normed = lambda norm, y: y if norm is None else norm(y, dtype=self.dtype)
    r, b, c = map(normed, norms, (r, b, c))
    return x, z, r, b, c, conv

  def _output(self, y, z):
    return self.o_proj(silu_gate(y, z).astype(self.dtype)).astype(self.dtype)


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

  Initially A_n = -n in each channel, dt is log-uniform between 0.001 and 0.1, skip = 1. The
  defaults are those of mamba-ssm's `Mamba` and of `MambaMixer` of transformers. FalconMamba has
  inner_norm="rms", Jamba "scaled_rms".

  Args:
    dim: D, the width of input and output.
    expand: E / D.
    state_dim: N, the state's width per channel.
    conv_size: W; None leaves the convolution out: x_t = silu(x').
    gate_rank: the width of r ("dt_rank" in mamba-ssm); None means D / 16, rounded up.
    use_bias: whether W_in and W_o have biases.
    conv_bias: whether the convolution has one.
    inner_norm: RMSNorm of each of r, b_t and c_t before they are used: "none", "rms" (without
      scale) or "scaled_rms".
    norm_eps: eps of these norms, under the root.
    num_layers: of the model; W_o starts as that of a linear layer, divided by sqrt(num_layers).
    dtype: of the projections and of x; dt, A, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, or `inner_norm` is unknown.

  Source: Mamba (Gu and Dao 2023), Algorithm 2 and section 3.4; initialization as in section 3.6 and
  its published code. The projections without a rule of their own start uniform within
  1 / sqrt(inputs).
  """

  name = "mamba"
  recurrence_flops = functools.partialmethod(flops.channel_states, per_entry=6)

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
      self.dt_proj.product(r),
      -jnp.exp(wide(self.a_log[...])),
      b,
      c,
      skip=self.skip[...],
      dt_softplus=True,
      dt_bias=self.dt_proj.bias[...],
      **self._place(recurrent, segment_ids),
    )
    return self._output(y, z), MambaState(conv, recurrent)


class Mamba2Block[State](Mixer[State]):
  """The block of `Mamba2`, whose arguments these are, around a recurrence with q, k, v and a decay.

  A subclass writes `_recurrence(q, k, v, log_decay, state, segment_ids, *more)`, which returns the
  outputs [B, T, H, P] and the state of q, k [B, T, G, N], v [B, T, H, P] and log_decay [B, T, H].
  """

  set_by_model = ("num_layers",)
  per_head: tuple[int, ...] = (1,)  # numbers of a token per head: dt, and `more` of the recurrence

  def __init__(
    self,
    dim: int,
    *,
    expand: float = 2,
    head_dim: int = 64,
    state_dim: int = 128,
    num_groups: int = 1,
    conv_size: int | None = 4,
    use_bias: bool = False,
    conv_bias: bool = True,
    norm_order: str = "gate_first",
    min_step: float = 0.0,
    max_step: float | None = None,
    part_scales: Sequence[float] | None = None,
    num_layers: int = 1,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.inner_dim = E = check_width("expand", expand, "dim", dim)
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

    self.num_groups = G = check_groups("num_groups", num_groups, H)
    self.norm_order = check_choice("norm_order", norm_order, NORM_ORDERS)
    if not 0 <= min_step <= (math.inf if max_step is None else max_step):
      raise ValueError(
        f"min_step={min_step} and max_step={max_step} bound the step sizes; they must not be "
        "negative, and min_step at most max_step."
      )
    self.min_step, self.max_step = min_step, max_step
    if part_scales is not None and len(part_scales) != 5:
      raise ValueError(
        f"part_scales={tuple(part_scales)} must be five numbers, of z, x, b, c and dt."
      )
    self.part_scales = None if part_scales is None else tuple(map(float, part_scales))

    def linear(inputs, outputs, gain=1.0):
      init, bias_init = uniform_fan_in(inputs, gain=gain), "zeros" if use_bias else None
      return Linear(inputs, outputs, kernel_init=init, bias_init=bias_init, **options)

    self.widths = (E, E, 2 * G * N, *(H * n for n in self.per_head))
    self.in_proj = linear(dim, sum(self.widths))
    self.conv = ShortConvolution(
      E + 2 * G * N, conv_size, use_bias=conv_bias, activation="silu", **options
    )
    self.dt_bias = nnx.Param(step_size_bias(rngs.params(), (H,), param_dtype))
    rate = jax.random.uniform(rngs.params(), (H,), jnp.float32, 1.0, 16.0)
    self.log_rate = nnx.Param(jnp.log(rate).astype(param_dtype))
    self.skip = nnx.Param(jnp.ones(H, param_dtype))
    self.norm_eps = check_norm_eps(norm_eps)
    has_norm = norm_order != "none"
    self.norm = RMSNorm(E, eps=norm_eps, param_dtype=param_dtype) if has_norm else None
    self.o_proj = linear(E, dim, num_layers**-0.5)

  def _run(self, x, state, segment_ids):
    """(out, the states of the convolution and of the recurrence)."""
    G, H = self.num_groups, self.num_heads
    conv, recurrent = state if state is not None else (None, None)
    z, inner, bc, dt, *more = split_linear(self.in_proj, x, self.widths)
    if self.part_scales is not None:
      of_z, of_x, of_b, of_c, of_dt = self.part_scales
      of_bc = jnp.repeat(jnp.array([of_b, of_c], bc.dtype), bc.shape[-1] // 2)
      z, inner, bc, dt = z * of_z, inner * of_x, bc * of_bc, dt * of_dt
    parts = [inner.astype(self.dtype), bc.astype(self.dtype)]
    (inner, bc), conv = self.conv.of_parts(parts, conv, segment_ids)
    b, c = jnp.split(bc, 2, axis=-1)

    dt = softplus(wide(dt) + wide(self.dt_bias[...]))
    if self.min_step > 0 or self.max_step is not None:
      dt = jnp.clip(dt, self.min_step, self.max_step)
    inner = split_heads(inner, H)  # [B, T, H, P]
    y, recurrent = self._recurrence(
      split_heads(c, G).astype(self.dtype),
      split_heads(b, G).astype(self.dtype),
      (dt[..., None] * inner).astype(self.dtype),
      -jnp.exp(wide(self.log_rate[...])) * dt,
      recurrent,
      segment_ids,
      *more,
    )
    y = (wide(y) + wide(self.skip[...])[:, None] * wide(inner)).astype(self.dtype)
    y = self._normed(merge_heads(y), z).astype(self.dtype)
    return self.o_proj(y).astype(self.dtype), conv, recurrent

  def _recurrence(self, q, k, v, log_decay, state, segment_ids, *more):
    raise NotImplementedError

  def _normed(self, y, z):
    """The gate and the norm, in the order of `norm_order`; y, z [B, T, E]."""
    if self.norm is None:
      return silu_gate(y, z)
    options = {"gate_first": self.norm_order == "gate_first", "dtype": self.dtype}
    if self.num_groups == 1:
      return self.norm(y, gate=z, **options)
    groups = lambda x: split_heads(x, self.num_groups)
    return merge_heads(self.norm.per_head(groups(y), gate=groups(z), **options))


@register_state
class Mamba2State(NamedTuple):
  """Recurrent state of `Mamba2`, float32."""

  conv: ConvState  # inputs [B, W - 1, E + 2 G N]
  recurrent: LinearAttentionState  # kv [B, H, N, P]


class Mamba2(Mamba2Block[Mamba2State]):
  r"""The Mamba-2 block: H heads of width P, one decay per token and head, E = expand D = H P.

      [z_t, u', dt'] = W_in u_t,      [x_t, b_t, c_t] = silu(conv(u'))    over W tokens, per channel
      dt_t = softplus(dt' + dt_bias)                                      per head
      S_t = exp(dt_t A) S_{t-1} + b_t (dt_t x_t)^T                        S: [N, P], A < 0 per head
      y_t = S_t^T c_t + skip x_t,      out_t = W_o RMSNorm(y_t * silu(z_t))

  b and c are shared by all heads, or by those of one of G groups. A = -exp(log_rate) is a
  parameter; the decay is data-dependent through dt. Initially -A is uniform between 1 and 16, dt
  log-uniform between 0.001 and 0.1, skip = 1.

  The defaults are those of mamba-ssm's `Mamba2`, and, but for its 8 groups, of `Mamba2Mixer` of
  transformers. Groups are normed one by one, as in both. `FalconH1Mixer` has norm_order "none",
  or another.

  Args:
    dim: D, the width of input and output.
    expand: E / D.
    head_dim: P; a divisor of E.
    state_dim: N, the width of b and c.
    num_groups: G, a divisor of H ("n_groups", "ngroups").
    conv_size: W; None leaves the convolution out.
    use_bias: whether W_in and W_o have biases.
    conv_bias: whether the convolution has one.
    norm_order: "gate_first", as above; "norm_first" for RMSNorm(y_t) * silu(z_t), which mamba-ssm
      calls norm_before_gate; "none" for y_t * silu(z_t).
    min_step, max_step: the range to which dt_t is clipped (mamba-ssm's `dt_limit`, transformers'
      `time_step_limit`); None for no upper bound.
    part_scales: factors of z_t, of x, b and c in u', and of dt' (Falcon-H1); None for 1.
    num_layers: of the model; W_o starts as that of a linear layer, divided by sqrt(num_layers).
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of x, b, c; dt, decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive or does not fit, `head_dim` does not divide E, or
      `norm_order` is unknown, or no step is between `min_step` and `max_step`.

  Source: Mamba-2 (Dao and Gu 2024), section 7.1; initialization as in its published code. The
  projections without a rule of their own start uniform within 1 / sqrt(inputs).
  """

  name = "mamba2"
  recurrence_flops = flops.linear_attention

  def _init_state(self, B):
    kv = jnp.zeros((B, self.num_heads, self.state_dim, self.head_dim), jnp.float32)
    return Mamba2State(self.conv.init_state(B), LinearAttentionState(kv, None))

  def _mix(self, x, state, segment_ids):
    out, conv, recurrent = self._run(x, state, segment_ids)
    return out, Mamba2State(conv, recurrent)

  def _recurrence(self, q, k, v, log_decay, state, segment_ids, *more):
    return linear_attention(
      q,
      k,
      v,
      log_decay=log_decay,
      scale=1.0,
      **self._place(state, segment_ids),
    )

"""S6 and SSD as the dynamical-systems framework compares them: recurrences without a block."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import check_choice, check_positive
from lnssm_jax.mixers.common.initializers import step_size_bias, uniform_fan_in
from lnssm_jax.mixers.common.projections import Linear
from lnssm_jax.ops import SelectiveState, selective_scan
from lnssm_jax.ops.core.precision import wide

INITIALIZATIONS = ("paper", "as_run")


class _Selective(Mixer[SelectiveState]):
  """The common part of S6 and SSD: W_x, skip and W_o. Subclasses make step sizes and rates."""

  set_by_model = ("num_layers",)

  def _build(self, dim, state_dim, rank, initialization, num_layers, dtype, param_dtype, rngs):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.state_dim = check_positive("state_dim", state_dim)
    self.rank = check_positive("gate_rank", rank)
    check_positive("num_layers", num_layers)
    as_run = check_choice("initialization", initialization, INITIALIZATIONS) == "as_run"

    def linear(inputs, outputs, *, share=1.0, **more):
      kernel_init = nnx.initializers.normal(0.02 * share) if as_run else uniform_fan_in(inputs)
      options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
      return Linear(inputs, outputs, kernel_init=kernel_init, **more, **options)

    self.x_proj = linear(dim, rank + 2 * state_dim)
    self.skip = nnx.Param(jnp.ones(dim, param_dtype))
    self.o_proj = linear(dim, dim, share=(2 * num_layers) ** -0.5)
    return linear, nnx.initializers.zeros if as_run else step_size_bias

  def _init_state(self, B):
    return selective_scan.init_state(batch=B, dim=self.dim, state_dim=self.state_dim)

  def _mix(self, x, state, segment_ids):
    x = x.astype(self.dtype)
    rank, N = self.rank, self.state_dim
    r, b, c = jnp.split(self.x_proj(x), [rank, rank + N], axis=-1)
    y, state = selective_scan(
      x,
      self._step_logits(r),
      -self._rates(),
      b,
      c,
      skip=self.skip[...],
      dt_softplus=True,
      **self._place(state, segment_ids),
    )
    return self.o_proj(y).astype(self.dtype), state

  def _step_logits(self, r: jax.Array) -> jax.Array:
    """[B, T, D], float32 at least, whose softplus is dt."""
    raise NotImplementedError

  def _rates(self) -> jax.Array:
    """-A [D, N] or [D, 1], positive, float32 at least."""
    raise NotImplementedError


class S6(_Selective):
  r"""S6 by itself: the recurrence of Mamba on the layer's input.

      [r, b_t, c_t] = W_x u_t,      dt_t = softplus(W_dt r + b_dt)
      S_t = exp(dt_t A) * S_{t-1} + (dt_t u_t) b_t^T              S: [D, N], A = -exp(a_log)
      out_t = W_o (S_t c_t + skip * u_t)

  Against `Mamba`: no W_in and no expansion, no convolution, no silu, no gate.

  Args:
    dim: D, the width.
    state_dim: N, the state's width per channel; 32 to 256 in the paper's comparison.
    gate_rank: the width of r; None means D / 16, rounded up.
    initialization: "paper": kernels uniform within 1 / sqrt(inputs), dt log-uniform between 0.001
      and 0.1; "as_run": normal with a standard deviation of 0.02, that of W_o divided by
      sqrt(2 num_layers), and b_dt = 0, so that dt is about 0.69, to which the training code of the
      comparison sets every layer after it was made. A_n = -n and skip = 1 in both.
    num_layers: of the model, for "as_run".
    dtype: of the projections and of u, b, c; dt, A, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, or `initialization` is unknown.

  Source: the dynamical-systems framework (Sieber et al. 2024), eqs. 4 and 18, and its published
  code.
  """

  name = "s6"
  recurrence_flops = functools.partialmethod(flops.channel_states, per_entry=6)

  def __init__(
    self,
    dim: int,
    *,
    state_dim: int = 64,
    gate_rank: int | None = None,
    initialization: str = "paper",
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    rank = -(-check_positive("dim", dim) // 16) if gate_rank is None else gate_rank
    linear, bias_init = self._build(
      dim, state_dim, rank, initialization, num_layers, dtype, param_dtype, rngs
    )
    self.dt_proj = linear(rank, dim, bias_init=bias_init)
    rates = jnp.broadcast_to(jnp.log(jnp.arange(1.0, state_dim + 1)), (dim, state_dim))
    self.a_log = nnx.Param(rates.astype(param_dtype))

  def _step_logits(self, r):
    return self.dt_proj(r)

  def _rates(self):
    return jnp.exp(wide(self.a_log[...]))


class SSD(_Selective):
  r"""SSD by itself: S6 with one decay rate for the whole layer, and one step logit per token.

      [r, b_t, c_t] = W_x u_t,      dt_t = softplus(r + dt_bias)     r: one number; dt_bias: [D]
      S_t = exp(-rate dt_t) * S_{t-1} + (dt_t u_t) b_t^T             S: [D, N], rate = exp(log_rate)
      out_t = W_o (S_t c_t + skip * u_t)

  Channels differ in their step size by its bias only, so that a channel's N numbers decay alike:
  linear attention with a decay of its values per token and channel.
  Against `Mamba2`: no heads, and as `S6` no W_in, no expansion, no convolution, no norm, no gate.

  Args:
    dim: D, the width.
    state_dim: N, the state's width per channel.
    initialization: as in `S6`; rate = 1 at the start.
    num_layers: of the model, for "as_run".
    dtype: of the projections and of u, b, c; dt, decays, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, or `initialization` is unknown.

  Source: the dynamical-systems framework (Sieber et al. 2024), section 4, and its published code,
  whose W_dt, [D, 1], is not used.
  """

  name = "ssd"
  recurrence_flops = functools.partialmethod(flops.channel_states, per_entry=5, per_channel=4)

  def __init__(
    self,
    dim: int,
    *,
    state_dim: int = 64,
    initialization: str = "paper",
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    _, bias_init = self._build(
      dim, state_dim, 1, initialization, num_layers, dtype, param_dtype, rngs
    )
    self.dt_bias = nnx.Param(bias_init(rngs.params(), (dim,), param_dtype))
    self.log_rate = nnx.Param(jnp.zeros(1, param_dtype))

  def _step_logits(self, r):
    return wide(r) + wide(self.dt_bias[...])

  def _rates(self):
    rate = jnp.exp(wide(self.log_rate[...]))
    return jnp.broadcast_to(rate, (self.dim, 1))

"""Longhorn: a state-space model that solves an online regression, in the block of Mamba."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_call, check_positive
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.initializers import uniform_fan_in
from lnssm_jax.mixers.layers import linear, linear_parts, silu_gate, wide
from lnssm_jax.mixers.short_convolution import ShortConvolution
from lnssm_jax.ops import DeltaRuleState, LonghornState
from lnssm_jax.ops.sequence_parallel import delta_rule, longhorn_scan


class LonghornMixerState(NamedTuple):
  """What a layer remembers of a sequence. float32."""

  conv: jax.Array  # [B, W - 1, E], the last inputs of the convolution
  memory: LonghornState  # memory [B, E, N]


class LonghornExactState(NamedTuple):
  """What a layer of the exact update remembers of a sequence. float32."""

  conv: jax.Array  # [B, W - 1, E], the last inputs of the convolution
  memory: DeltaRuleState  # kv [B, 1, N, E]


class _LonghornBlock(Divisible):
  """What both updates share: Mamba's block with keys, queries and a rate in place of b, c, dt."""

  def __init__(
    self,
    dim: int,
    *,
    expand: int = 2,
    state_dim: int = 16,
    conv_width: int = 4,
    rate_rank: int | None = None,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.inner_dim = check_positive("expand", expand) * dim
    self.state_dim = check_positive("state_dim", state_dim)
    rank = -(-dim // 16) if rate_rank is None else check_positive("rate_rank", rate_rank)
    check_positive("num_layers", num_layers)
    self.rate_rank = rank
    E, N = self.inner_dim, state_dim

    def projection(inputs, outputs, gain=1.0):
      init = uniform_fan_in(inputs, gain=gain)
      return linear(inputs, outputs, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    self.in_proj = projection(dim, 2 * E)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.conv = ShortConvolution(E, conv_width, activation="silu", **options)
    self.x_proj = projection(E, rank + 2 * N)
    self.beta_proj = projection(rank, E)
    self.beta_bias = nnx.Param(jnp.zeros(E, param_dtype))
    self.skip = nnx.Param(jnp.ones(E, param_dtype))
    self.o_proj = projection(E, dim, num_layers**-0.5)

  def _streams(self, x, conv, segment_ids):
    """x [B, T, E], beta [B, T, E] float32, k and q [B, T, N], the gate, the convolution's state."""
    inner, gate = linear_parts(self.in_proj, x, [self.inner_dim] * 2)
    inner, conv = self.conv(inner, conv, segment_ids)
    rank, N = self.rate_rank, self.state_dim
    rate, k, q = jnp.split(self.x_proj(inner), [rank, rank + N], axis=-1)
    rate = wide(self.beta_proj(rate)) + wide(self.beta_bias[...])
    return inner, jax.nn.sigmoid(rate), k, q, gate, conv


class Longhorn(_LonghornBlock):
  r"""The Longhorn block: online regression of inputs on keys, E = expand D channels wide.

      [x', z_t] = W_in u_t,      x_t = silu(conv(x'))                    over W steps, per channel
      [r, k_t, q_t] = W_x x_t,      beta_t = sigmoid(W_beta r + beta_bias)
      e_t = beta_t / (1 + beta_t ||k_t||^2)                              one rate per channel
      S_t = (1 - e_t (k_t^2)^T) * S_{t-1} + (e_t * x_t) k_t^T            S: [E, N]
      out_t = W_o (silu(z_t) * (S_t q_t + skip * x_t))

  Every decay lies in (0, 1] for keys of any size. beta is 1/2 on average at the start.

  Args:
    dim: D, the width of input and output.
    expand: E / D.
    state_dim: N, the width of keys and queries.
    conv_width: W.
    rate_rank: the width of r; None means D / 16, rounded up.
    num_layers: of the model; W_o starts as that of a linear layer, divided by sqrt(num_layers).
    dtype: of the projections and of x, k, q; beta, the decays, the state and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Raises:
    ValueError: a size is not positive.

  Source: Longhorn (Liu et al. 2024), Algorithm 1; skip, gate and zero bias as in its published
  code; the block and its initialisation are Mamba's.
  """

  def init_state(self, batch_size: int) -> LonghornMixerState:
    """The state before the first token: zeros."""
    B = check_positive("batch_size", batch_size)
    memory = LonghornState(jnp.zeros((B, self.inner_dim, self.state_dim), jnp.float32))
    return LonghornMixerState(conv=self.conv.init_state(B), memory=memory)

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: LonghornMixerState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, LonghornMixerState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    conv, memory = state if state is not None else (None, None)
    inner, beta, k, q, gate, conv = self._streams(x, conv, segment_ids)
    y, memory = longhorn_scan(
      inner,
      beta,
      k,
      q,
      skip=self.skip[...],
      axis_name=self.sequence_axis,
      initial_state=memory,
      segment_ids=segment_ids,
    )
    out = self.o_proj(silu_gate(y, gate).astype(self.dtype))
    return out, LonghornMixerState(conv, memory)


class LonghornExact(_LonghornBlock):
  r"""`Longhorn` with the exact solution of its regression in place of the diagonal one.

      S_{t,i} = (I - e_{t,i} k_t k_t^T) S_{t-1,i} + e_{t,i} x_{t,i} k_t          for each channel i

  S_{t,i} [N] is the minimum of ||s - S_{t-1,i}||^2 + beta_{t,i} (s . k_t - x_{t,i})^2. Parameters,
  arguments, and everything else are those of `Longhorn`. Every channel has a triangular system of
  its own in each chunk, so this form costs more than the diagonal one.

  Raises:
    ValueError: a size is not positive.

  Source: Longhorn (Liu et al. 2024), theorem 3.1.
  """

  def init_state(self, batch_size: int) -> LonghornExactState:
    """The state before the first token: zeros."""
    B = check_positive("batch_size", batch_size)
    memory = DeltaRuleState(jnp.zeros((B, 1, self.state_dim, self.inner_dim), jnp.float32))
    return LonghornExactState(conv=self.conv.init_state(B), memory=memory)

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: LonghornExactState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, LonghornExactState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token), as `Longhorn` does.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    conv, memory = state if state is not None else (None, None)
    inner, beta, k, q, gate, conv = self._streams(x, conv, segment_ids)
    squared = jnp.sum(jnp.square(wide(k)), axis=-1, keepdims=True)
    rate = beta / (1 + beta * squared)
    one_head = lambda z: z[:, :, None]
    y, memory = delta_rule(
      one_head(q),
      one_head(k),
      one_head(inner),
      one_head(rate),
      axis_name=self.sequence_axis,
      initial_state=memory,
      segment_ids=segment_ids,
    )
    y = wide(y[:, :, 0])
    y = y + wide(self.skip[...]) * wide(inner)
    out = self.o_proj(silu_gate(y, gate).astype(self.dtype))
    return out, LonghornExactState(conv, memory)

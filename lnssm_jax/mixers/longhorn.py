"""Longhorn: a state-space model that solves an online regression, in the block of Mamba."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import ops
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.mamba import SelectiveBlock
from lnssm_jax.ops import ConvState, DeltaRuleState, delta_rule, longhorn_scan
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state


@register_state
class LonghornState(NamedTuple):
  """Recurrent state of `Longhorn`, float32."""

  conv: ConvState  # inputs [B, W - 1, E]
  recurrent: ops.LonghornState  # h [B, E, N]


@register_state
class LonghornExactState(NamedTuple):
  """Recurrent state of `LonghornExact`, float32."""

  conv: ConvState  # inputs [B, W - 1, E]
  recurrent: DeltaRuleState  # kv [B, 1, N, E]


class _Longhorn[State](SelectiveBlock[State]):
  """Mamba's block with keys, queries and a rate in place of b, c and dt."""

  def _gate_projection(self, linear):
    self.beta_proj = linear(bias_init="zeros")


class Longhorn(_Longhorn[LonghornState]):
  r"""The Longhorn block: online regression of inputs on keys, E = expand D channels wide.

      [x', z_t] = W_in u_t,      x_t = silu(conv(x'))             over W tokens, per channel
      [r, k_t, q_t] = W_x x_t,      beta_t = sigmoid(W_beta r + b_beta)
      e_t = beta_t / (1 + beta_t ||k_t||^2)                       one rate per channel
      S_t = (1 - e_t (k_t^2)^T) * S_{t-1} + (e_t * x_t) k_t^T     S: [E, N]
      out_t = W_o (silu(z_t) * (S_t q_t + skip * x_t))

  Every decay lies in (0, 1] for keys of any size. beta is 1/2 on average at the start.

  Args:
    dim: D, the width of input and output.
    expand: E / D.
    state_dim: N, the width of keys and queries.
    conv_size: W; None leaves the convolution out.
    gate_rank: the width of r; None means D / 16, rounded up.
    use_bias: whether W_in and W_o have biases.
    conv_bias: whether the convolution has one.
    inner_norm, norm_eps: RMSNorm of r, k_t and q_t, as in `Mamba`.
    num_layers: of the model; W_o starts as that of a linear layer, divided by sqrt(num_layers).
    dtype: of the projections and of x, k, q; beta, decays, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, or `inner_norm` is unknown.

  Source: Longhorn (Liu et al. 2024), Algorithm 1; skip, gate and zero bias as in its published
  code; the block and its initialization are Mamba's.
  """

  name = "longhorn"
  recurrence_flops = functools.partialmethod(flops.channel_states, per_entry=7)

  def _init_state(self, B):
    h = jnp.zeros((B, self.inner_dim, self.state_dim), jnp.float32)
    return LonghornState(self.conv.init_state(B), ops.LonghornState(h))

  def _mix(self, x, state, segment_ids):
    conv, recurrent = state if state is not None else (None, None)
    x, z, r, k, q, conv = self._streams(x, conv, segment_ids)
    y, recurrent = longhorn_scan(
      x,
      self.beta_proj.product(r),
      k,
      q,
      skip=self.skip[...],
      beta_sigmoid=True,
      beta_bias=self.beta_proj.bias[...],
      **self._place(recurrent, segment_ids),
    )
    return self._output(y, z), LonghornState(conv, recurrent)


class LonghornExact(_Longhorn[LonghornExactState]):
  r"""`Longhorn` with the exact solution of its regression in place of the diagonal one.

      S_{t,i} = (I - e_{t,i} k_t k_t^T) S_{t-1,i} + e_{t,i} x_{t,i} k_t          per channel i

  S_{t,i} [N] is the minimum of ||s - S_{t-1,i}||^2 + beta_{t,i} (s . k_t - x_{t,i})^2. Parameters
  and arguments are those of `Longhorn`. Every channel has a triangular system of its own in each
  chunk, so this form costs more than the diagonal one.

  Raises:
    ValueError: a size is not positive.

  Source: Longhorn (Liu et al. 2024), theorem 3.1.
  """

  name = "longhorn_exact"
  recurrence_flops = functools.partialmethod(flops.delta_rule, decays=0)

  def _init_state(self, B):
    kv = jnp.zeros((B, 1, self.state_dim, self.inner_dim), jnp.float32)
    return LonghornExactState(self.conv.init_state(B), DeltaRuleState(kv))

  def _mix(self, x, state, segment_ids):
    conv, recurrent = state if state is not None else (None, None)
    x, z, r, k, q, conv = self._streams(x, conv, segment_ids)
    beta = jax.nn.sigmoid(self.beta_proj(r))
    squared = jnp.sum(jnp.square(wide(k)), axis=-1, keepdims=True)
    rate = beta / (1 + beta * squared)
    one_head = lambda z: z[:, :, None]
    y, recurrent = delta_rule(
      one_head(q),
      one_head(k),
      one_head(x),
      one_head(rate),
      scale=1.0,
      **self._place(recurrent, segment_ids),
    )
    y = wide(y[:, :, 0]) + wide(self.skip[...]) * wide(x)
    return self._output(y, z), LonghornExactState(conv, recurrent)

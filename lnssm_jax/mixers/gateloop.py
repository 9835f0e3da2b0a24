"""GateLoop: linear attention with data-dependent complex decays."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.angles import running_angles
from lnssm_jax.mixers.common.checks import check_heads
from lnssm_jax.mixers.common.complex_state import ComplexState, empty_state
from lnssm_jax.mixers.common.initializers import uniform_fan_in
from lnssm_jax.mixers.common.norms import RMSNorm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.ops import LinearAttentionState, linear_attention
from lnssm_jax.ops.core.precision import wide


class GateLoop(Mixer[ComplexState]):
  r"""Each key channel decays and rotates, by a data-dependent factor and angle.

      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t
      a_t = sigmoid(W_a x_t + b_a) e^(i (W_p x_t + b_p))                 per key channel, complex
      S_t = diag(a_t) S_{t-1} + k_t v_t^T,      y_t = Re(S_t^T q_t)                per head
      out_t = W_o (RMSNorm(y_t) * silu(W_g x_t))                         norm over all D channels

  Computed with real numbers: with the sum of angles p_t, the rotated S'_t = e^(-i p_t) S_t decays
  by |a_t| alone, and its real and imaginary parts are the two halves of one linear attention with
  keys [k cos p, k sin p] and queries [q cos p, q sin p]. Sums of angles are kept within a turn.

  Args:
    dim: D, the width; a multiple of `num_heads`. The width of a head is K = D / H, for keys and
      values; the paper's largest models have D heads of width 1.
    num_heads: H.
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of the rotated q, k and of v; decays, angles, norm, state and
      sums are float32.
    param_dtype: of the parameters.

  The state is S, [B, H, K, K], its real and its imaginary part.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Source: GateLoop (Katsch 2023), sections 3.2-3.4. Kernels start uniform within 1 / sqrt(D) and
  b_a, b_p at zero, since the paper gives no values; its norm is not named, and is an RMSNorm with a
  scale here. (The author's later code is another recurrence.)
  """

  name = "gateloop"
  starts_as_model = True
  needs_length = True
  set_by_model = ("num_heads",)
  recurrence_flops = functools.partialmethod(flops.complex_states, per_entry=10)

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.head_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    linear = functools.partial(Linear, dim, dim, kernel_init=uniform_fan_in(dim), **options)
    self.q_proj, self.k_proj, self.v_proj = linear(), linear(), linear()
    self.a_proj, self.p_proj = linear(bias_init="zeros"), linear(bias_init="zeros")
    self.g_proj = linear()
    self.norm = RMSNorm(dim, eps=norm_eps, param_dtype=param_dtype)
    self.o_proj = linear()

  def _init_state(self, B):
    return empty_state(B, self.num_heads, self.head_dim, self.head_dim)

  def _log_decays(self, x, state, segment_ids):
    (of_both,) = super()._log_decays(x, state, segment_ids)  # of real and imaginary parts
    return [of_both[..., : self.head_dim]]

  def _mix(self, x, state, segment_ids):
    heads = lambda z: split_heads(z, self.num_heads)
    twice = lambda z, w: jnp.concatenate([z, w], axis=-1)
    log_decay = heads(jax.nn.log_sigmoid(self.a_proj(x)))
    angle, last = running_angles(self.p_proj(x), None, self.sequence_axis)
    cos, sin = heads(jnp.cos(angle)), heads(jnp.sin(angle))
    q, k = heads(wide(self.q_proj(x))), heads(wide(self.k_proj(x)))
    # The state before the first token is not rotated; the second half of S' is -Im.
    recurrent = None
    if state is not None:
      recurrent = LinearAttentionState(jnp.concatenate([state.real, -state.imag], axis=-2), None)
    y, recurrent = linear_attention(
      twice(q * cos, q * sin).astype(self.dtype),
      twice(k * cos, k * sin).astype(self.dtype),
      heads(self.v_proj(x)),
      log_decay=twice(log_decay, log_decay),
      scale=1.0,
      **self._place(recurrent, segment_ids),
    )
    real, imag = jnp.split(recurrent.kv, 2, axis=-2)
    cos, sin = (turn(last).reshape(*real.shape[:-1], 1) for turn in (jnp.cos, jnp.sin))
    state = ComplexState(cos * real + sin * imag, sin * real - cos * imag)
    y = self.norm(merge_heads(y), gate=self.g_proj(x), dtype=self.dtype)
    return self.o_proj(y), state

"""TransNormerLLM's linear attention: one constant decay per head, slower in upper layers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import (
  check_choice,
  check_heads,
  check_layer,
  check_norm_eps,
  check_positive,
)
from lnssm_jax.mixers.common.initializers import uniform_fan_in
from lnssm_jax.mixers.common.norms import LayerNorm
from lnssm_jax.mixers.common.positions import cosine_features
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.ops import LinearAttentionState, linear_attention
from lnssm_jax.ops.core.halo import step_positions
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state
from lnssm_jax.ops.norms.api import normalize

POSITIONS = ("lrpe", "none")
VARIANTS = ("lightning", "transnormerllm")


def alibi_slopes(num_heads: int) -> np.ndarray:
  """s [H] float64, geometric from 2^(-8 / H) to 2^-8 if H is a power of two.

  Otherwise those of the next lower power of two, then every second one of the next higher.
  Source: ALiBi (Press et al. 2022), section 3, and its published code.
  """
  lower = 1 << (num_heads.bit_length() - 1)
  slopes = lambda n: 2.0 ** (-8.0 * np.arange(1, n + 1) / n)
  return np.concatenate([slopes(lower), slopes(2 * lower)[::2][: num_heads - lower]])


@register_state
class TNLState(NamedTuple):
  """Recurrent state of `TNL`."""

  recurrent: LinearAttentionState  # kv [B, H, 2 K, V] float32; K in place of 2 K without LRPE
  position: jax.Array  # [B] int32, the number of tokens of the segment so far


class TNL(Mixer[TNLState]):
  r"""TransNormerLLM's token mixer (lightning attention): decay by head and layer, gated output.

      q_t = silu(W_q x_t),  k_t = silu(W_k x_t),  v_t = silu(W_v x_t)
      S_t = exp(-s_h (1 - layer / (num_layers - 1) + 1e-5)) S_{t-1} + k_t v_t^T      per head h
      y_t = S_t^T q_t,      out_t = W_o (sigmoid(U_g W_g x_t) * LayerNorm(y_t))

  s_h are the slopes of ALiBi: low heads have the shortest memory, and the last layer hardly
  decays. The norm is over all D channels, with scale and bias.

  Two models have this name. The above, variant="lightning", is that of Lightning Attention (Qin et
  al. 2024). In TransNormerLLM (Qin et al. 2023), variant="transnormerllm", v_t = W_v x_t, and
  out_t = W_o ((W_g x_t) * y_t / (rms(y_t) + eps)), with a gate of full rank and eps = 1e-8.

  positions="lrpe" replaces q_t . k_s by the sum over channels of q_i k_i cos((t - s) theta_i), with
  features of width 2 K. In the first layer theta [D], which is learned, starts at 10000^(-2 i /
  D), i counting the channels of all heads; in the others it is zero, and stays so because its
  gradient is: they have no positions, as published. Their parameters and states have the same
  shapes, so that layers can be stacked.

  The decays are not learned: they are parameters, whose gradient is zero, only because they differ
  between layers.

  Args:
    dim: D, the width; a multiple of `num_heads`. K = V = D / H.
    num_heads: H.
    layer, num_layers: the layer's index in its model. `layer` counts from 0 and may be traced.
      A model of one layer has the decays of a first layer.
    positions: "lrpe", or "none" in every layer, with half the state.
    variant: "lightning" or "transnormerllm".
    gate_rank: the width of W_g x; None means K. Only with variant="lightning".
    norm_eps: eps of the norm; None means 1e-5, under the root, with variant="lightning", else 1e-8,
      added to it.
    dtype: of the projections and of q, k, v; decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive, `positions` or
      `variant` is unknown, or a `gate_rank` is given for a gate of full rank.

  Sources: Lightning Attention (Qin et al. 2024, arXiv 2405.17381) and its authors' layer, which has
  no positions; decays and positions, TransNormerLLM (Qin et al. 2023), sections 3.1-3.2. Kernels
  start uniform within 1 / sqrt(inputs), that framework's default.
  """

  name = "tnl"
  starts_as_model = True
  set_by_model = ("num_heads", "layer", "num_layers")
  gate_down_proj: Any  # with g_proj, None; so are the next two
  gate_up_proj: Any
  norm: Any
  recurrence_flops = flops.linear_attention

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    positions: str = "lrpe",
    variant: str = "lightning",
    gate_rank: int | None = None,
    norm_eps: float | None = None,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.head_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    check_layer(layer, num_layers)
    check_choice("positions", positions, POSITIONS)
    self.variant = check_choice("variant", variant, VARIANTS)
    if norm_eps is None:
      norm_eps = 1e-5 if variant == "lightning" else 1e-8
    self.norm_eps = check_norm_eps(norm_eps)
    if variant == "transnormerllm" and gate_rank is not None:
      raise ValueError(
        f"gate_rank={gate_rank}: the gate of variant='transnormerllm' has full rank; leave it out."
      )
    rank = self.head_dim if gate_rank is None else check_positive("gate_rank", gate_rank)

    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

    def linear(inputs=dim, outputs=dim):
      return Linear(inputs, outputs, kernel_init=uniform_fan_in(inputs), **options)

    self.q_proj, self.k_proj, self.v_proj = linear(), linear(), linear()
    if variant == "lightning":
      self.gate_down_proj, self.gate_up_proj = linear(dim, rank), linear(rank, dim)
      self.norm, self.g_proj = LayerNorm(dim, eps=norm_eps, param_dtype=param_dtype), None
    else:
      self.gate_down_proj = self.gate_up_proj = self.norm = None
      self.g_proj = linear()
    self.o_proj = linear()
    if positions == "none":
      self.theta = None
    else:
      theta = 10000.0 ** (-2 * jnp.arange(dim) / dim)
      self.theta = nnx.Param(jnp.where(jnp.asarray(layer) == 0, theta, 0.0).astype(param_dtype))
    height = jnp.asarray(layer, jnp.float32) / max(num_layers - 1, 1)
    log_rate = jnp.log(alibi_slopes(num_heads)) + jnp.log(1 - height + 1e-5)
    self.fixed_log_rate = nnx.Param(log_rate.astype(param_dtype))

  def _init_state(self, B):
    H, K = self.num_heads, self.head_dim
    features = K if self.theta is None else 2 * K
    kv = jnp.zeros((B, H, features, K), jnp.float32)
    return TNLState(LinearAttentionState(kv, None), jnp.zeros(B, jnp.int32))

  def _mix(self, x, state, segment_ids):
    B, T, _ = x.shape
    recurrent, position = state if state is not None else (None, jnp.zeros(B, jnp.int32))
    axis = self.sequence_axis
    positions, position = step_positions(B, T, segment_ids, position, axis_name=axis)
    stream = lambda projection: split_heads(jax.nn.silu(wide(projection(x))), self.num_heads)
    q, k = stream(self.q_proj), stream(self.k_proj)
    lightning = self.variant == "lightning"
    v = stream(self.v_proj) if lightning else split_heads(self.v_proj(x), self.num_heads)
    if self.theta is not None:
      theta = self.theta[...].reshape(self.num_heads, self.head_dim)
      q, k = cosine_features(q, positions, theta), cosine_features(k, positions, theta)
    y, recurrent = linear_attention(
      q.astype(self.dtype),
      k.astype(self.dtype),
      v.astype(self.dtype),
      log_decay=-jnp.exp(wide(jax.lax.stop_gradient(self.fixed_log_rate[...]))),
      scale=1.0,
      **self._place(recurrent, segment_ids),
    )
    out = self.o_proj(self._gated(merge_heads(y), x).astype(self.dtype))
    return out, TNLState(recurrent, position)

  def _gated(self, y, x):
    """The norm of y [B, T, D], times the gate that x [B, T, D] gives."""
    if self.g_proj is not None:
      y = normalize(y, eps=self.norm_eps, floor=self.norm_eps, dtype=wide(y).dtype)[0]
      return wide(self.g_proj(x)) * y
    return jax.nn.sigmoid(wide(self.gate_up_proj(self.gate_down_proj(x)))) * self.norm(y)

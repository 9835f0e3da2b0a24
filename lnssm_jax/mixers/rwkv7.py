"""RWKV-7's time mixer: a state that erases with a key of its own before it decays."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import check_heads, check_layer, check_positive
from lnssm_jax.mixers.common.initializers import orthogonal, shift_weight
from lnssm_jax.mixers.common.norms import LayerNorm, unit_norm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.mixers.common.token_shift import interpolated, last_input
from lnssm_jax.ops import DeltaRuleState, delta_rule
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state

# log a = -exp(-1/2) sigmoid(.): a decay is at least exp(-exp(-1/2)) = 0.545.
_STRONGEST_LOG_DECAY = -math.exp(-0.5)

# The powers of the shift weights, by stream.
_POWERS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}


@register_state
class RWKV7State(NamedTuple):
  """Recurrent state of `RWKV7`, float32."""

  shift: jax.Array  # [B, D], the last input
  recurrent: DeltaRuleState  # kv [B, H, K, K]


def _rank(dim: int, head_dim: int, factor: float) -> int:
  """The width of a low-rank matrix, by the rule of the published code."""
  return max(32, 32 * round(factor * dim**0.5 * head_dim / 64 / 32))


class RWKV7(Mixer[RWKV7State]):
  r"""RWKV-7's time mixer: the generalized delta rule with an in-context learning rate per channel.

      x^s_t = x_t + (x_{t-1} - x_t) * mu_s            one stream for each of r, w, k, v, a, g
      r_t = W_r x^r_t,  z_t = W_k x^k_t,  v_t = W_v x^v_t
      a_t = sigmoid(b_a + A_2 A_1 x^a_t),   g_t = G_2 sigmoid(G_1 x^g_t)
      log d_t = -exp(-1/2) sigmoid(b_w + D_2 tanh(D_1 x^w_t))
      e_t = unit(z_t * k_k)  per head,      k_t = z_t * (1 + (a_t - 1) * k_a)
      S_t = (diag(d_t) - (e_t * a_t) e_t^T) S_{t-1} + k_t v_t^T                        per head
      y_t = GroupNorm(S_t^T r_t) + (r_t . (r_k * k_t)) v_t,     out_t = W_o (y_t * g_t)

  In the later layers of a model v_t moves towards the values u_t of its first layer, per channel:

      v_t = W_v x^v_t + sigmoid(b_v + V_2 V_1 x^v_t) * (u_t - W_v x^v_t)

  unit(z) = z / sqrt(sum(z^2) + 1e-6). The norm has one group per head, and a scale and a bias per
  channel. The old value is read before the state decays. Initially W_o, D_1, A_1, V_1 and G_1 are
  zero, W_r, W_v orthogonal, W_k 0.1 times that, and D_2, A_2, V_2, G_2 0.1 times an orthogonal
  matrix; the other parameters depend on the layer and the channel as in fla's layer, whose defaults
  these are (with fuse_norm=True).

  `LanguageModel`, and `Backbone` in one direction, give the layers u_t where the first of them is
  an RWKV-7. Alone, in both directions, and behind a first layer of another kind a layer has its own
  values only. Where num_layers is 1 there are no V_1, V_2 and b_v; the first layer has them, and
  they change nothing there: its own values are u_t.

  Args:
    dim: D, the width; a multiple of `num_heads`. The width of a head is K = D / H, 64 in the
      published models.
    num_heads: H.
    layer, num_layers: the layer's index in its model, for the initial decays and shifts. `layer`
      counts from 0 and may be traced.
    decay_rank: the width of D_1; None means 2.5 sqrt(D) K / 64, to a multiple of 32.
    rate_rank: the width of A_1; None means the same.
    value_rank: the width of V_1; None means 1.7 sqrt(D) K / 64, to a multiple of 32.
    gate_rank: the width of G_1; None means 5 sqrt(D), to a multiple of 32.
    norm_eps: eps of the norm, which is multiplied by K as in the published code.
    dtype: of the projections and of r, k, v; decays, rates, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Source: Goose (RWKV-7, Peng et al. 2025, arXiv 2503.14456), section 4; ranks, norm and initial
  values as in fla's `RWKV7Attention`, which follows RWKV-LM.
  """

  name = "rwkv7"
  set_by_model = ("num_heads", "layer", "num_layers")
  recomputes = True
  recurrence_flops = functools.partialmethod(flops.delta_rule, decays=1, writes=1)

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    decay_rank: int | None = None,
    rate_rank: int | None = None,
    value_rank: int | None = None,
    gate_rank: int | None = None,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    K = self.head_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    check_layer(layer, num_layers)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    param = lambda value: nnx.Param(jnp.asarray(value, param_dtype))
    place = {"layer": layer, "num_layers": num_layers}
    mu = lambda stream: param(1 - shift_weight(dim, **place, power=_POWERS[stream]))
    self.mu_r, self.mu_w, self.mu_k = mu("r"), mu("w"), mu("k")
    self.mu_v, self.mu_a, self.mu_g = mu("v"), mu("a"), mu("g")

    linear = functools.partial(Linear, dim, dim, **options)
    self.r_proj, self.k_proj = (
      linear(kernel_init=orthogonal(1)),
      linear(kernel_init=orthogonal(0.1)),
    )
    self.v_proj = linear(kernel_init=orthogonal(1))
    self.o_proj = linear(kernel_init=nnx.initializers.zeros_init())

    def low_rank(name, rank, default):
      rank = default if rank is None else check_positive(name, rank)
      down = Linear(dim, rank, kernel_init=nnx.initializers.zeros_init(), **options)
      gain = 0.1 * max(1.0, (rank / dim) ** 0.5)
      return down, Linear(rank, dim, kernel_init=orthogonal(gain), **options)

    narrow = _rank(dim, K, 2.5)
    self.decay_down_proj, self.decay_up_proj = low_rank("decay_rank", decay_rank, narrow)
    self.rate_down_proj, self.rate_up_proj = low_rank("rate_rank", rate_rank, narrow)
    self.gate_down_proj, self.gate_up_proj = low_rank("gate_rank", gate_rank, _rank(dim, 64, 5.0))

    along = jnp.linspace(-0.5, 0.5, dim) if dim > 1 else jnp.zeros(1)  # over the channels
    within = jnp.tile(jnp.linspace(-1.0, 1.0, K) if K > 1 else jnp.zeros(1), num_heads)
    zigzag = within * jnp.abs(within)  # over those of each head
    depth = jnp.asarray(layer, jnp.float32) / max(num_layers - 1, 1)
    rising = -6 + 6 * (along + 0.5) ** (1 + depth**0.3)
    self.decay_up_proj.bias = param(rising + 0.5 + 2.5 * zigzag)
    self.rate_up_proj.bias = param(-0.19 + 0.3 * zigzag + 0.4 * along)
    self.erase_gain = param(0.71 - 0.1 * along)  # k_k
    self.rate_gain = param(jnp.full(dim, 1.02))  # k_a
    self.bonus_gain = param(jnp.full(dim, -0.04))  # r_k
    self.norm = LayerNorm(dim, eps=norm_eps, param_dtype=param_dtype)
    self.norm.eps *= K
    height = (1.0 + jnp.asarray(layer, jnp.float32)) / num_layers
    self.norm.scale = param(jnp.full(dim, height**0.7))
    self.first_values: jax.Array | None = nnx.data(None)
    down = up = None
    if num_layers > 1:
      down, up = low_rank("value_rank", value_rank, _rank(dim, K, 1.7))
      up.bias = param(0.73 - 0.4 * along)
    self.value_down_proj, self.value_up_proj = down, up
    if num_layers == 1 and value_rank is not None:
      raise ValueError(
        f"value_rank={value_rank}: with num_layers=1 no layer mixes its values with those of the "
        "first; leave it out, or set num_layers."
      )

  def _init_state(self, B):
    recurrent = delta_rule.init_state(
      batch=B, heads=self.num_heads, key_dim=self.head_dim, value_dim=self.head_dim
    )
    return RWKV7State(jnp.zeros((B, self.dim), jnp.float32), recurrent)

  def values(self, x, state, segment_ids):
    """Values [B, T, D] that later layers mix with their own; None where there are none."""
    if self.value_up_proj is None:
      return None
    return self.v_proj(*self._shifted(x, state, segment_ids, self.mu_v))

  def _shifted(self, x, state, segment_ids, *mus):
    """The streams of these shift weights."""
    present = [1 - wide(mu[...]) for mu in mus]
    place = {"axis_name": self.sequence_axis, "dtype": self.dtype}
    return interpolated(x, present, None if state is None else state.shift, segment_ids, **place)

  def _mix(self, x, state, segment_ids):
    recurrent = None if state is None else state.recurrent
    mus = (self.mu_r, self.mu_w, self.mu_k, self.mu_v, self.mu_a, self.mu_g)
    of_r, of_w, of_k, of_v, of_a, of_g = self._shifted(x, state, segment_ids, *mus)
    heads = lambda z: split_heads(z, self.num_heads)
    narrow = lambda z: z.astype(self.dtype)

    r, v = heads(self.r_proj(of_r)), self.v_proj(of_v)
    first, down, up = self.first_values, self.value_down_proj, self.value_up_proj
    if first is not None and down is not None and up is not None:
      v = narrow(wide(v) + jax.nn.sigmoid(up(down(of_v))) * (wide(first) - wide(v)))
    v, z = heads(v), wide(self.k_proj(of_k))
    d = self.decay_up_proj(narrow(jnp.tanh(wide(self.decay_down_proj(of_w)))))
    a = jax.nn.sigmoid(self.rate_up_proj(self.rate_down_proj(of_a)))
    g = self.gate_up_proj(narrow(jax.nn.sigmoid(wide(self.gate_down_proj(of_g)))))
    e = unit_norm(heads(z * wide(self.erase_gain[...])))
    k = narrow(heads(z * (1 + (a - 1) * wide(self.rate_gain[...]))))
    y, recurrent = delta_rule(
      r,
      narrow(e * heads(a)),
      v,
      jnp.ones(r.shape[:3], a.dtype),
      log_decay=_STRONGEST_LOG_DECAY * jax.nn.sigmoid(heads(d)),
      erase_key=narrow(e),
      write_key=k,
      erase_before_decay=True,
      scale=1.0,
      **self._place(recurrent, segment_ids),
    )
    bonus = jnp.sum(wide(r) * wide(k) * heads(wide(self.bonus_gain[...])), -1, keepdims=True)
    y = merge_heads(self.norm.per_head(y) + bonus * wide(v))
    out = self.o_proj(narrow(y * wide(g)))
    return out, RWKV7State(last_input(x, self.sequence_axis), recurrent)

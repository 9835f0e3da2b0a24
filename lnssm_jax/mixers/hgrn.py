"""Gated linear recurrences h = f h + (1 - f) x: LRN, and HGRN and HGRN2, whose forget gates have a
lower bound that rises with depth."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import check_choice, check_heads, check_layer, check_positive
from lnssm_jax.mixers.common.complex_state import (
  ComplexState,
  empty_state,
  from_complex,
  to_complex,
)
from lnssm_jax.mixers.common.initializers import uniform_fan_in
from lnssm_jax.mixers.common.norms import LayerNorm, RMSNorm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.ops import DiagonalState, LinearAttentionState, diagonal_scan, linear_attention
from lnssm_jax.ops.core.precision import wide

LOWER_BOUNDS = ("learned", "shared", "none")
ACTIVATIONS = {"tanh": jnp.tanh, "silu": jax.nn.silu, "none": lambda x: x}
HGRN2_VARIANTS = ("authors", "fla")
OUTPUT_GATES = ("sigmoid", "none")

# Replaces a lower bound of 0 where its logarithm is needed.
_TINY = 1e-30


class _BoundedMixer[State](Mixer[State]):
  """A mixer whose forget gates have a lower bound gamma [D]."""

  def _make_bound(self, lower_bound, layer, num_layers, param_dtype) -> None:
    """Sets `bound`, of gamma = 1 - exp(-bound^2) = layer / num_layers, or a row of a table."""
    check_layer(layer, num_layers)
    self.lower_bound = check_choice("lower_bound", lower_bound, LOWER_BOUNDS)
    self.tied = "bound" if lower_bound == "shared" else None
    initial = jnp.ones(self.dim)
    if lower_bound == "learned":
      initial *= jnp.sqrt(-jnp.log1p(-jnp.asarray(layer, jnp.float32) / num_layers))
    self.bound = None if lower_bound == "none" else nnx.Param(initial.astype(param_dtype))

  @staticmethod
  def tie(table):
    """[L, D] -> gamma [L, D]: sums over layers 1 to l of the softmax over all L."""
    parts = jax.nn.softmax(wide(table), axis=0)
    return jnp.cumsum(parts.at[0].set(0.0), axis=0)

  def _bounds(self) -> tuple[jax.Array, jax.Array]:
    """(gamma, 1 - gamma)."""
    if self.bound is None:
      return jnp.zeros(()), jnp.ones(())
    if self.tied is not None:
      raise ValueError(
        f"{type(self).__name__}: lower_bound='shared' is a table of all layers of a LanguageModel;"
        " for a layer by itself use 'learned' or 'none', or model.layer(l).mixer."
      )
    bound = wide(self.bound[...])
    if self.lower_bound == "shared":
      return bound, 1 - bound
    return -jnp.expm1(-jnp.square(bound)), jnp.exp(-jnp.square(bound))


class HGRN2(_BoundedMixer[LinearAttentionState]):
  r"""Linear attention whose key is the complement of the forget gate: k = 1 - lambda.

      q_t = sigmoid(W_q x_t + b_q),  v_t = silu(W_v x_t + b_v),  m_t = sigmoid(W_f x_t + b_f)
      lambda_t = gamma + (1 - gamma) m_t                                 per key channel
      S_t = diag(lambda_t) S_{t-1} + (1 - lambda_t) v_t^T,    y_t = S_t^T q_t      per head
      out_t = W_o LayerNorm(y_t)                                         over all D channels

  variant="fla" is the layer of fla's `HGRN2Attention`, which its published models have: there
  q_t = silu(W_q x_t), v_t = W_v x_t, y_t = K^(-1/2) S_t^T q_t, an RMSNorm, whose eps is 1e-5
  whatever its norm_eps says (0.6.0), and no biases.

  The lower bound gamma [D] is layer / num_layers at the start: upper layers have longer memory.
  That of the first layer is 0 and stays so.

  With lower_bound="shared" all layers of a `LanguageModel` share one table Gamma [L, D], as in the
  paper: P = softmax(Gamma) over layers, and gamma_l = P_1 + ... + P_l, so that no layer forgets
  more slowly than one above it. By default a layer has parameters of its own, gamma = 1 -
  exp(-bound^2), which start at the same values: learning may move each bound in [0, 1), and nothing
  keeps them in order.

  Args:
    dim: D, the width; a multiple of `num_heads`. The width of a head is K = D / H, for keys and
      values; 128 in the paper.
    num_heads: H.
    layer, num_layers: the layer's index in its model. `layer` counts from 0 and may be traced.
    lower_bound: "learned", "shared", or "none" for gamma = 0 in all layers.
    variant: "authors", as above, or "fla".
    output_bias: whether W_o has a bias. It has one in the authors' code, by default.
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive, `lower_bound` or
      `variant` is unknown, or a layer with lower_bound="shared" is called outside of a model.

  Source: HGRN2 (Qin et al. 2024), section 3; the activations are those of its published code. The
  projections and their biases start uniform within 1 / sqrt(D).
  """

  name = "hgrn2"
  starts_as_model = True
  set_by_model = ("num_heads", "layer", "num_layers")
  recurrence_flops = flops.linear_attention

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    lower_bound: str = "learned",
    variant: str = "authors",
    output_bias: bool = False,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.head_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    init, options = uniform_fan_in(dim), {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    linear = functools.partial(Linear, dim, dim, kernel_init=init, **options)
    self.q_proj, self.f_proj, self.v_proj = linear(), linear(), linear()
    self.variant = check_choice("variant", variant, HGRN2_VARIANTS)
    if variant == "authors":
      for layer_with_bias in (self.q_proj, self.f_proj, self.v_proj):
        layer_with_bias.draw_bias(init, rngs)
    self._make_bound(lower_bound, layer, num_layers, param_dtype)
    norm = LayerNorm if variant == "authors" else RMSNorm
    self.norm = norm(dim, eps=norm_eps, param_dtype=param_dtype)
    self.o_proj = linear()
    if output_bias:
      self.o_proj.draw_bias(init, rngs)

  def _init_state(self, B):
    H, K = self.num_heads, self.head_dim
    return LinearAttentionState(jnp.zeros((B, H, K, K), jnp.float32), None)

  def _mix(self, x, state, segment_ids):
    q, v, scale = wide(self.q_proj(x)), wide(self.v_proj(x)), 1.0
    if self.variant == "authors":
      q, v = jax.nn.sigmoid(q), jax.nn.silu(v)
    else:
      q, scale = jax.nn.silu(q), self.head_dim**-0.5
    log_decay, k = self._gates(wide(self.f_proj(x)))
    heads = lambda z: split_heads(z, self.num_heads)
    y, state = linear_attention(
      heads(q.astype(self.dtype)),
      heads(k.astype(self.dtype)),
      heads(v.astype(self.dtype)),
      log_decay=heads(log_decay),
      scale=scale,
      **self._place(state, segment_ids),
    )
    y = self.norm(merge_heads(y)).astype(self.dtype)
    return self.o_proj(y).astype(self.dtype), state

  def _gates(self, f):
    """log(lambda) and 1 - lambda; exact to the dtype, with finite gradients, for every f."""
    if self.bound is None:
      return jax.nn.log_sigmoid(f), jax.nn.sigmoid(-f)
    gamma, rest = self._bounds()
    k = rest * jax.nn.sigmoid(-f)
    # lambda = (gamma + e^f) / (1 + e^f). Near 1 that quotient would cancel: there, log(1 - k).
    quotient = jnp.logaddexp(jnp.log(jnp.maximum(gamma, _TINY)), f) - jax.nn.softplus(f)
    return jnp.where(k <= 0.5, jnp.log1p(-jnp.minimum(k, 0.5)), quotient), k


class HGRN(_BoundedMixer[ComplexState]):
  r"""A complex gated linear recurrence in each of D channels; its phase is constant.

      c_t = silu(W_c x_t + b_c)                        2 D numbers: D real and D imaginary parts
      m_t = sigmoid(W_f x_t + b_f),      lambda_t = gamma + (1 - gamma) m_t
      h_t = lambda_t e^(i theta) h_{t-1} + (1 - lambda_t) c_t
      out_t = W_o (LayerNorm([Re h_t, Im h_t]) * silu(W_g x_t + b_g))

  theta [D] is learned and starts at 10000^(-2 i / D). The lower bound gamma [D] is as in `HGRN2`:
  layer / num_layers at the start; that of the first layer stays 0.

  Args:
    dim: D, the width.
    layer, num_layers: the layer's index in its model. `layer` counts from 0 and may be traced.
    lower_bound: "learned", "shared", or "none" for gamma = 0 in all layers.
    output_bias: whether W_o has a bias. It has one in the authors' code, by default.
    norm_eps: eps of the norm, under the root.
    dtype: of the projections; gates, decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  The state is h [B, D], its real and its imaginary part.

  Raises:
    ValueError: a size is not positive, `lower_bound` is unknown, or a layer with "shared" is called
      outside of a model.

  Source: HGRN (Qin et al. 2023), section 3.2; norm and output gate in the order of its published
  code (the paper multiplies by the gate first). The projections and their biases start uniform
  within 1 / sqrt(D), W_o within 1 / sqrt(2 D).
  """

  name = "hgrn"
  starts_as_model = True
  set_by_model = ("layer", "num_layers")
  recurrence_flops = functools.partialmethod(flops.complex_states, per_entry=8)

  def __init__(
    self,
    dim: int,
    *,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    lower_bound: str = "learned",
    output_bias: bool = False,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    init, options = uniform_fan_in(dim), {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    linear = functools.partial(Linear, kernel_init=init, **options)
    self.c_proj, self.f_proj = linear(dim, 2 * dim), linear(dim, dim)
    self.g_proj = linear(dim, 2 * dim)
    for layer_with_bias in (self.c_proj, self.f_proj, self.g_proj):
      layer_with_bias.draw_bias(init, rngs)
    self._make_bound(lower_bound, layer, num_layers, param_dtype)
    theta = 1e4 ** (-2 * jnp.arange(dim, dtype=jnp.float32) / dim)
    self.theta = nnx.Param(theta.astype(param_dtype))
    self.norm = LayerNorm(2 * dim, eps=norm_eps, param_dtype=param_dtype)
    self.o_proj = linear(2 * dim, dim, kernel_init=uniform_fan_in(2 * dim))
    if output_bias:
      self.o_proj.draw_bias(uniform_fan_in(2 * dim), rngs)

  def _init_state(self, B):
    return empty_state(B, self.dim)

  def _mix(self, x, state, segment_ids):
    c, f = jax.nn.silu(self.c_proj(x)), self.f_proj(x)
    gamma, rest = self._bounds()
    forget = jax.nn.sigmoid(f) * rest + gamma
    theta = wide(self.theta[...])
    h, recurrent = diagonal_scan(
      jax.lax.complex(forget * jnp.cos(theta), forget * jnp.sin(theta)),
      rest * jax.nn.sigmoid(-f) * jax.lax.complex(*jnp.split(c, 2, axis=-1)),
      **self._place(None if state is None else DiagonalState(to_complex(state)), segment_ids),
    )
    y = self.norm(jnp.concatenate([h.real, h.imag], axis=-1)) * jax.nn.silu(self.g_proj(x))
    return self.o_proj(y.astype(self.dtype)).astype(self.dtype), from_complex(recurrent.h)


class LRN(Mixer[DiagonalState]):
  r"""The gated impulse linear recurrence (GILR): each channel is a moving average of its inputs.

      f_t = sigmoid(W_f x_t + b_f),   i_t = act(W_i x_t + b_i),   g_t = sigmoid(W_g x_t + b_g)
      h_t = f_t h_{t-1} + (1 - f_t) i_t
      out_t = W_o (g_t h_t)

  Args:
    dim: D, the width.
    activation: act: "tanh", "silu" or "none".
    output_gate: "sigmoid", or "none" for g = 1, the paper's own layer.
    dtype: of the projections; gates, decays, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, or a choice is unknown.

  Source: Martin and Cundy 2018, section 2.2; the output gate is that of the LRN in the LCSM paper's
  table of models. The papers' layers end with g h; W_o makes it one for a residual stream. The
  projections and their biases start uniform within 1 / sqrt(D).
  """

  name = "lrn"
  starts_as_model = True
  recurrence_flops = flops.diagonal

  def __init__(
    self,
    dim: int,
    *,
    activation: str = "tanh",
    output_gate: str = "sigmoid",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.activation = check_choice("activation", activation, ACTIVATIONS)
    check_choice("output_gate", output_gate, OUTPUT_GATES)
    init, options = uniform_fan_in(dim), {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    linear = functools.partial(Linear, dim, dim, kernel_init=init, **options)
    self.f_proj, self.i_proj, self.o_proj = linear(), linear(), linear()
    self.f_proj.draw_bias(init, rngs)
    self.i_proj.draw_bias(init, rngs)
    self.g_proj = linear(bias_init=init) if output_gate == "sigmoid" else None

  def _init_state(self, B):
    return DiagonalState(jnp.zeros((B, self.dim)))

  def _mix(self, x, state, segment_ids):
    f = self.f_proj(x)
    value = ACTIVATIONS[self.activation](self.i_proj(x))
    y, state = diagonal_scan(
      jax.nn.sigmoid(f),
      jax.nn.sigmoid(-f) * value,
      **self._place(state, segment_ids),
    )
    if self.g_proj is not None:
      y = y * jax.nn.sigmoid(self.g_proj(x))
    return self.o_proj(y.astype(self.dtype)), state

"""The recurrent block of Griffin, with the real-gated linear recurrent unit (RG-LRU)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.mixers.common.projections import BlockDiagonal, Linear
from lnssm_jax.mixers.common.short_convolution import ShortConvolution
from lnssm_jax.ops import ConvState, DiagonalState, diagonal_scan
from lnssm_jax.ops.core.halo import continues
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.segments import segments_of
from lnssm_jax.ops.core.states import register_state

_EXPONENT = 8.0  # c of the paper: the decay is a^(c r)
_STEEPEST_ROOT = 1000.0  # bounds the derivative of the square root of 1 - a^2


@register_state
class RGLRUState(NamedTuple):
  """Recurrent state of `RGLRU`, float32."""

  conv: ConvState  # inputs [B, W - 1, E]
  recurrent: DiagonalState  # h [B, E]
  started: jax.Array  # [B], 0 before a sequence's first token, then 1


class RGLRU(Mixer[RGLRUState]):
  r"""Griffin's recurrent block: a gated linear recurrence per channel, E channels wide.

      x_t = conv(W_x u)_t                                                over W tokens, per channel
      r_t = sigmoid(R x_t + b_r),      i_t = sigmoid(I x_t + b_i)        R, I block-diagonal
      a_t = exp(-8 r_t softplus(L)),   h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t)
      out_t = W_o (gelu(W_y u_t) h_t)

  At the first token of a sequence or of a segment the factor sqrt(1 - a^2) is 1. Its derivative is
  clipped at 1000. Initially exp(-softplus(L))^2 is uniform between 0.9^2 and 0.999^2. gelu is the
  tanh approximation.

  Args:
    dim: D, the width of input and output.
    num_heads: how many blocks R and I have.
    width: E, a multiple of `num_heads`; None means D.
    conv_size: W.
    use_bias: whether W_x, W_y and W_o have biases, as in RecurrentGemma.
    dtype: of the projections and of x; gates, decays, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: the width is not a multiple of `num_heads`, or a size is not positive.

  Source: Griffin (De et al. 2024), sections 2.2-2.4; initialization, first token and the bound of
  the derivative as in RecurrentGemma's published code, which is the layer with use_bias=True:
  kernels normal with variance 1 / inputs (the convolution's 0.01 / W), biases zero.
  """

  name = "rg_lru"
  set_by_model = ("num_heads",)
  recurrence_flops = flops.diagonal
  sharding = ((r"\w+_gate/kernel", (None, "fsdp", None)),)  # [H, D / H, D / H]

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    width: int | None = None,
    conv_size: int = 4,
    use_bias: bool = False,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.width = E = dim if width is None else check_positive("width", width)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    normal = functools.partial(
      nnx.initializers.variance_scaling, mode="fan_in", distribution="normal"
    )
    bias_init = "zeros" if use_bias else None
    linear = functools.partial(Linear, kernel_init=normal(1.0), bias_init=bias_init, **options)
    self.x_proj, self.y_proj = linear(dim, E), linear(dim, E)
    self.conv = ShortConvolution(E, conv_size, kernel_init=normal(0.01), **options)
    self.decay_gate = BlockDiagonal(E, num_heads, **options)
    self.input_gate = BlockDiagonal(E, num_heads, **options)
    squared = jax.random.uniform(rngs.params(), (E,), jnp.float32, 0.9**2, 0.999**2)
    rate = -0.5 * jnp.log(squared)  # softplus(L)
    self.decay_rate = nnx.Param(jnp.log(jnp.expm1(rate)).astype(param_dtype))
    self.o_proj = linear(E, dim)

  def _init_state(self, B):
    h = jnp.zeros((B, self.width), jnp.float32)
    return RGLRUState(self.conv.init_state(B), DiagonalState(h), jnp.zeros(B, jnp.float32))

  def _mix(self, x, state, segment_ids):
    conv, recurrent, started = self._init_state(x.shape[0]) if state is None else state
    gate = jax.nn.gelu(wide(self.y_proj(x)), approximate=True)
    inner, conv = self.conv(self.x_proj(x).astype(self.dtype), conv, segment_ids)

    rate = jax.nn.sigmoid(self.decay_gate(inner)) * jax.nn.softplus(wide(self.decay_rate[...]))
    log_decay = -_EXPONENT * rate
    begun = started != 0
    if self.sequence_axis is not None:
      begun = continues(begun, segment_ids, axis_name=self.sequence_axis)
    is_first = _first_tokens(begun, x.shape[1], segment_ids)[..., None]
    factor = jnp.where(is_first, 1.0, _bounded_sqrt(-jnp.expm1(2 * log_decay)))
    h, recurrent = diagonal_scan(
      jnp.exp(log_decay),
      factor * jax.nn.sigmoid(self.input_gate(inner)) * inner,
      **self._place(recurrent, segment_ids),
    )
    out = self.o_proj((gate * h).astype(self.dtype)).astype(self.dtype)
    return out, RGLRUState(conv, recurrent, jnp.ones_like(started))


def _first_tokens(begun: jax.Array, length: int, segment_ids) -> jax.Array:
  """[B, T], true at the first token of a sequence or segment; `begun` [B]: not at T = 0."""
  segments = segments_of("RGLRU", segment_ids, begun.shape[0], length)
  first = jnp.zeros((begun.shape[0], length), bool) if segments is None else segments.first()
  return jnp.concatenate([~begun[:, None], first[:, 1:]], axis=1)


@jax.custom_jvp
def _bounded_sqrt(x: jax.Array) -> jax.Array:
  return jnp.sqrt(x)


@_bounded_sqrt.defjvp
def _bounded_sqrt_jvp(primals, tangents):
  (x,), (dx,) = primals, tangents
  lowest = 1 / (4 * _STEEPEST_ROOT**2)
  return jnp.sqrt(x), dx / (2 * jnp.sqrt(jnp.maximum(x, lowest)))

"""The recurrent block of Griffin, with the real-gated linear recurrent unit (RG-LRU)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_call, check_heads, check_positive
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.layers import linear, merge_heads, split_heads, wide
from lnssm_jax.mixers.short_convolution import ShortConvolution
from lnssm_jax.ops import DiagonalState
from lnssm_jax.ops.checks import first_of_segment, segment_index
from lnssm_jax.ops.sequence_parallel import continues, diagonal_scan

_EXPONENT = 8.0  # c of the paper: the decay is a^(c r)
_STEEPEST_ROOT = 1000.0  # the largest derivative that the square root of 1 - a^2 passes back


class RGLRUState(NamedTuple):
  """What a layer remembers of a sequence. float32."""

  conv: jax.Array  # [B, W - 1, E], the last inputs of the convolution
  memory: DiagonalState  # h [B, E]
  started: jax.Array  # [B], 0 before a sequence's first token, then 1


class _BlockDiagonal(nnx.Module):
  """x -> W x + b with W one square block per head: kernel [H, E / H, E / H], bias [E]."""

  def __init__(self, width: int, num_heads: int, *, dtype, param_dtype, rngs: nnx.Rngs):
    block = check_heads(width, num_heads)
    self.num_heads, self.dtype = num_heads, dtype
    kernel = jax.random.normal(rngs.params(), (num_heads, block, block)) * block**-0.5
    self.kernel = nnx.Param(kernel.astype(param_dtype))
    self.bias = nnx.Param(jnp.zeros(width, param_dtype))

  def __call__(self, x: jax.Array) -> jax.Array:
    kernel = self.kernel[...].astype(self.dtype)
    y = jnp.einsum("bthi,hij->bthj", split_heads(x, self.num_heads), kernel)
    return wide(merge_heads(y)) + wide(self.bias[...])


class RGLRU(Divisible):
  r"""Griffin's recurrent block: a gated linear recurrence per channel, E channels wide.

      x_t = conv(W_x u)_t                                                over W steps, per channel
      r_t = sigmoid(R x_t + b_r),      i_t = sigmoid(I x_t + b_i)        R, I block-diagonal
      a_t = exp(-8 r_t softplus(L)),   h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t)
      out_t = W_o (gelu(W_y u_t) h_t)

  At the first token of a sequence or of a segment the factor sqrt(1 - a^2) is 1. Its derivative is
  cut at 1000. Initially exp(-softplus(L))^2 is uniform between 0.9^2 and 0.999^2.

  Args:
    dim: D, the width of input and output.
    num_heads: how many blocks R and I have.
    width: E, a multiple of `num_heads`; None means D.
    conv_width: W.
    dtype: of the projections and of x; gates, decays, the state and sums are float32.
    param_dtype: of the parameters.

  gelu is the tanh approximation. Cutting a sequence anywhere and passing the state on gives the
  same result as one call.

  Raises:
    ValueError: the width is not a multiple of `num_heads`, or a size is not positive.

  Source: Griffin (De et al. 2024), sections 2.2-2.4; initialisation, first token and the bound of
  the derivative as in RecurrentGemma's published code: kernels normal with variance 1 / inputs (the
  convolution's 0.01 / W), biases zero. W_x, W_y and W_o have no biases here.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    width: int | None = None,
    conv_width: int = 4,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.width = E = dim if width is None else check_positive("width", width)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    normal = functools.partial(nnx.initializers.variance_scaling, mode="fan_in")
    projection = lambda n, m: linear(n, m, normal(1.0, distribution="normal"), **options)
    self.x_proj, self.y_proj = projection(dim, E), projection(dim, E)
    self.conv = ShortConvolution(
      E,
      conv_width,
      kernel_init=normal(0.01, distribution="normal"),
      **options,
    )
    self.decay_gate = _BlockDiagonal(E, num_heads, **options)
    self.input_gate = _BlockDiagonal(E, num_heads, **options)
    squared = jax.random.uniform(rngs.params(), (E,), jnp.float32, 0.9**2, 0.999**2)
    rate = -0.5 * jnp.log(squared)  # softplus(L)
    self.decay_rate = nnx.Param(jnp.log(jnp.expm1(rate)).astype(param_dtype))
    self.o_proj = projection(E, dim)

  def init_state(self, batch_size: int) -> RGLRUState:
    """The state before the first token: zeros."""
    B = check_positive("batch_size", batch_size)
    memory = DiagonalState(jnp.zeros((B, self.width), jnp.float32))
    return RGLRUState(self.conv.init_state(B), memory, jnp.zeros(B, jnp.float32))

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: RGLRUState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, RGLRUState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    conv, memory, started = self.init_state(len(x)) if state is None else state
    gate = jax.nn.gelu(wide(self.y_proj(x)), approximate=True)
    inner, conv = self.conv(self.x_proj(x), conv, segment_ids)

    rate = jax.nn.sigmoid(self.decay_gate(inner)) * jax.nn.softplus(wide(self.decay_rate[...]))
    log_decay = -_EXPONENT * rate
    begun = started != 0
    if self.sequence_axis is not None:
      begun = continues(begun, segment_ids, axis_name=self.sequence_axis)
    is_first = _first_tokens(begun, x.shape[1], segment_ids)[..., None]
    factor = jnp.where(is_first, 1.0, _bounded_sqrt(-jnp.expm1(2 * log_decay)))
    h, memory = diagonal_scan(
      jnp.exp(log_decay),
      factor * jax.nn.sigmoid(self.input_gate(inner)) * inner,
      axis_name=self.sequence_axis,
      initial_state=memory,
      segment_ids=segment_ids,
    )
    return self.o_proj((gate * h).astype(self.dtype)), RGLRUState(
      conv, memory, jnp.ones_like(started)
    )


def _first_tokens(begun: jax.Array, length: int, segment_ids) -> jax.Array:
  """[B, T], true where a sequence or a segment begins; `begun` [B]: it has before these steps."""
  segments = segment_index("RGLRU", segment_ids, len(begun), length)
  if segments is None:
    segments = jnp.zeros((len(begun), length), jnp.int32)
  return jnp.concatenate([~begun[:, None], first_of_segment(segments)[:, 1:]], axis=1)


@jax.custom_jvp
def _bounded_sqrt(x: jax.Array) -> jax.Array:
  return jnp.sqrt(x)


@_bounded_sqrt.defjvp
def _bounded_sqrt_jvp(primals, tangents):
  (x,), (dx,) = primals, tangents
  lowest = 1 / (4 * _STEEPEST_ROOT**2)
  return jnp.sqrt(x), dx / (2 * jnp.sqrt(jnp.maximum(x, lowest)))

"""A causal convolution over a few steps, each channel by itself."""

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_positive
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.initializers import uniform_fan_in
from lnssm_jax.ops.checks import accumulation_dtype, check_shape, segment_index
from lnssm_jax.ops.sequence_parallel import inputs_before, of_last

_NAME = "short_convolution"


def short_convolution(
  x: jax.Array,  # [B, T, D]
  kernel: jax.Array,  # [W, D], its last row for the present step
  bias: jax.Array | None = None,  # [D]
  state: jax.Array | None = None,  # [B, W - 1, D]
  segment_ids: jax.Array | None = None,  # [B, T] integer
  *,
  axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Depthwise causal convolution of W steps, and the inputs that later steps will need.

      y_t = bias + sum_j kernel_j * x_{t - (W - 1) + j}        j = 0 ... W - 1

  Before the first step stand the inputs in `state`, oldest first (zeros if None); they belong to
  the first segment. Across a segment's start nothing is read. With `axis_name`, x is one device's
  part of a sequence whose steps are divided over that mesh axis, at least W - 1 of them; `state`,
  given and returned, is that of the whole sequence.

  Returns:
    y [B, T, D] and the last W - 1 inputs [B, W - 1, D], with zeros for those before the last
    segment; both float32 (float64 for float64 inputs).

  Raises:
    ValueError: shapes do not agree; the message names the argument.
  """
  check_shape(_NAME, "x", x, (None,) * 3, "[B, T, D]")
  B, T, D = x.shape
  check_shape(_NAME, "kernel", kernel, (None, D), "[W, D]")
  width = kernel.shape[0]
  acc = accumulation_dtype(x)
  if state is None:
    state = jnp.zeros((B, width - 1, D), acc)
  check_shape(_NAME, "state", state, (B, width - 1, D), "[B, W - 1, D]")
  if axis_name is not None:
    state = inputs_before(
      x.astype(acc), width - 1, state.astype(acc), segment_ids, axis_name=axis_name
    )
  inputs = jnp.concatenate([state.astype(acc), x.astype(acc)], axis=1)
  segments = segment_index(_NAME, segment_ids, B, T)
  # The segment of each of `inputs`: `state` is of the first.
  of_input = None if segments is None else jnp.pad(segments, ((0, 0), (width - 1, 0)))

  def visible(first, count, segment):  # `inputs` from `first` on, zero where of another segment
    window = inputs[:, first : first + count]
    if of_input is None:
      return window
    return jnp.where((of_input[:, first : first + count] == segment)[..., None], window, 0)

  y = sum(kernel[j].astype(acc) * visible(j, T, segments) for j in range(width))
  if bias is not None:
    y = y + bias.astype(acc)
  last = None if segments is None else segments[:, -1:]
  state = visible(T, width - 1, last)
  return jnp.asarray(y), state if axis_name is None else of_last(state, axis_name=axis_name)


class ShortConvolution(Divisible):
  """`short_convolution` with its parameters: `kernel` [W, D] and, unless left out, `bias` [D].

  Args:
    dim, width: D and W.
    use_bias: whether there is a bias.
    kernel_init: makes the kernel; None draws kernel and bias uniformly within 1 / sqrt(W), as the
      frameworks of the published codes do. With `kernel_init` the bias starts at zero.
  """

  def __init__(
    self,
    dim: int,
    width: int,
    *,
    use_bias: bool = True,
    kernel_init=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.width = check_positive("dim", dim), check_positive("width", width)
    bias_init = nnx.initializers.zeros_init() if kernel_init else uniform_fan_in(width)
    kernel_init = kernel_init or uniform_fan_in(width)
    self.kernel = nnx.Param(kernel_init(rngs.params(), (width, dim), param_dtype))
    self.bias = nnx.Param(bias_init(rngs.params(), (dim,), param_dtype)) if use_bias else None

  def init_state(self, batch_size: int) -> jax.Array:
    """The inputs before the first step, [B, W - 1, D] float32: zeros."""
    return jnp.zeros((batch_size, self.width - 1, self.dim), jnp.float32)

  def __call__(self, x: jax.Array, state=None, segment_ids=None) -> tuple[jax.Array, jax.Array]:
    """Returns (y [B, T, D], the state after the last step), as `short_convolution` does."""
    bias = None if self.bias is None else self.bias[...]
    options = {"axis_name": self.sequence_axis}
    return short_convolution(x, self.kernel[...], bias, state, segment_ids, **options)

"""A causal convolution over a few steps, each channel by itself."""

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_positive
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.initializers import uniform_fan_in
from lnssm_jax.ops import causal_conv1d
from lnssm_jax.ops.checks import accumulation_dtype
from lnssm_jax.ops.sequence_parallel import inputs_before, of_last


def short_convolution(
  x: jax.Array,  # [B, T, D]
  kernel: jax.Array,  # [W, D], its last row for the present step
  bias: jax.Array | None = None,  # [D]
  state: jax.Array | None = None,  # [B, W - 1, D]
  segment_ids: jax.Array | None = None,  # [B, T] integer
  *,
  activation: str | None = None,
  dtype=None,
  axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`ops.causal_conv1d`, also of a divided sequence.

  With `axis_name`, x is one device's part of a sequence whose steps are divided over that mesh
  axis, at least W - 1 of them; `state`, given and returned, is that of the whole sequence.

  Args:
    activation: None or "silu".
    dtype: of y; None means that of the sums, float32 (float64 for float64 inputs).

  Returns:
    y [B, T, D] and the last W - 1 inputs [B, W - 1, D], float32 (float64 for float64 inputs).

  Raises:
    ValueError: shapes do not agree; the message names the argument.
  """
  acc = accumulation_dtype(x)
  if axis_name is not None:
    state = inputs_before(x.astype(acc), len(kernel) - 1, state, segment_ids, axis_name=axis_name)
  y, state = causal_conv1d(
    x,
    kernel,
    bias,
    activation=activation,
    dtype=acc if dtype is None else dtype,
    initial_state=state,
    segment_ids=segment_ids,
  )
  return y, state if axis_name is None else of_last(state, axis_name=axis_name)


class ShortConvolution(Divisible):
  """`short_convolution` with its parameters: `kernel` [W, D] and, unless left out, `bias` [D].

  Args:
    dim, width: D and W.
    use_bias: whether there is a bias.
    activation: of the sums: None or "silu".
    kernel_init: makes the kernel; None draws kernel and bias uniformly within 1 / sqrt(W), as the
      frameworks of the published codes do. With `kernel_init` the bias starts at zero.
    dtype: of the output; None means that of the sums, float32.
  """

  def __init__(
    self,
    dim: int,
    width: int,
    *,
    use_bias: bool = True,
    activation: str | None = None,
    kernel_init=None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.width = check_positive("dim", dim), check_positive("width", width)
    self.activation, self.dtype = activation, dtype
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
    options = {"activation": self.activation, "dtype": self.dtype, "axis_name": self.sequence_axis}
    return short_convolution(x, self.kernel[...], bias, state, segment_ids, **options)

"""A depthwise causal convolution over a few tokens, with its parameters."""

import itertools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.mixers.common.initializers import uniform_fan_in
from lnssm_jax.ops import ConvState, causal_conv1d
from lnssm_jax.ops.core.precision import accumulation_dtype, wide


def convolve_each(
  convs: Sequence["ShortConvolution"],
  streams: Sequence[jax.Array],
  states: Sequence[ConvState],
  segment_ids: jax.Array | None,
) -> tuple[list[jax.Array], tuple[ConvState, ...]]:
  """Convolves each stream [B, T, D]; returns them and the states. Without `convs`, as they are."""
  if not convs:
    return list(streams), ()
  given = states or [None] * len(convs)
  pairs = [
    conv(x, state, segment_ids) for conv, x, state in zip(convs, streams, given, strict=True)
  ]
  return [x for x, _ in pairs], tuple(state for _, state in pairs)


class ShortConvolution(nnx.Module):
  """`ops.causal_conv1d` with its parameters: `kernel` [W, D] and, unless left out, `bias` [D].

  Args:
    dim, width: D and W. A width of None leaves the convolution out: only the activation remains,
      and the state is empty.
    use_bias: whether there is a bias.
    activation: of the sums: None or "silu".
    kernel_init: makes the kernel; None draws kernel and bias uniformly within 1 / sqrt(W), as the
      frameworks of the published codes do. With `kernel_init` the bias starts at zero.
    dtype: of the output; None means that of the sums, float32.
  """

  sequence_axis: str | None = None  # as in `Mixer`

  def __init__(
    self,
    dim: int,
    width: int | None,
    *,
    use_bias: bool = True,
    activation: Literal["silu"] | None = None,
    kernel_init=None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.activation, self.dtype = check_positive("dim", dim), activation, dtype
    if width is None:
      self.width, self.kernel, self.bias = 1, None, None
      return
    self.width = check_positive("conv_size", width)
    bias_init = nnx.initializers.zeros_init() if kernel_init else uniform_fan_in(width)
    kernel_init = kernel_init or uniform_fan_in(width)
    self.kernel = nnx.Param(kernel_init(rngs.params(), (width, dim), param_dtype))
    self.bias = nnx.Param(bias_init(rngs.params(), (dim,), param_dtype)) if use_bias else None

  def init_state(self, batch_size: int) -> ConvState:
    """Returns the inputs before the first token: zeros."""
    return ConvState(jnp.zeros((batch_size, self.width - 1, self.dim), jnp.float32))

  def __call__(
    self, x: jax.Array, state: ConvState | None = None, segment_ids: jax.Array | None = None
  ) -> tuple[jax.Array, ConvState]:
    """(y [B, T, D], state after the last token); arguments as in `ops.causal_conv1d`."""
    return self._convolve(x, _value(self.kernel), _value(self.bias), state, segment_ids)

  def of_parts(
    self,
    parts: Sequence[jax.Array],
    state: ConvState | None = None,
    segment_ids: jax.Array | None = None,
  ) -> tuple[list[jax.Array], ConvState]:
    """(y of each part, state) of arrays [B, T, D_n] that together have D channels.

    Without a copy of the parts into one array, nor back in the gradient.
    """
    boundaries = list(itertools.accumulate(x.shape[-1] for x in parts))[:-1]
    split = lambda z: [None] * len(parts) if z is None else jnp.split(z, boundaries, axis=-1)
    kernels, biases = split(_value(self.kernel)), split(_value(self.bias))
    inputs = split(None if state is None else state.inputs)
    states = [None if x is None else ConvState(x) for x in inputs]
    results = [
      self._convolve(*arguments, segment_ids)
      for arguments in zip(parts, kernels, biases, states, strict=True)
    ]
    last = jnp.concatenate([state.inputs for _, state in results], axis=-1)
    return [y for y, _ in results], ConvState(last)

  def _convolve(self, x, kernel, bias, state, segment_ids):
    dtype = accumulation_dtype(x) if self.dtype is None else self.dtype
    if kernel is None:
      y = jax.nn.silu(wide(x)) if self.activation == "silu" else x
      last = jnp.zeros((x.shape[0], 0, x.shape[-1]), jnp.float32)
      return y.astype(dtype), ConvState(last) if state is None else state
    return causal_conv1d(
      x,
      kernel,
      bias,
      activation=self.activation,
      dtype=dtype,
      initial_state=state,
      segment_ids=segment_ids,
      axis_name=self.sequence_axis,
    )


def _value(param):
  return None if param is None else param[...]

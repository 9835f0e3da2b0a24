"""The convolution as a sum of shifted inputs, which XLA fuses into one loop."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.causal_conv1d.types import ConvState, Inputs, Options
from lnssm_jax.ops.core.precision import accumulation_dtype


def reference(inputs: Inputs, options: Options):
  """(y of each convolution, ConvState)."""
  x, kernels, bias, offsets, state, segments = inputs
  index = None if segments is None else segments.index
  W, T, acc = kernels.shape[1], x.shape[1], accumulation_dtype(x)
  window = jnp.concatenate([_before(x, state, W), x.astype(acc)], axis=1)
  # The document of each of `window`: the state belongs to the first.
  document = None if index is None else jnp.pad(index, ((0, 0), (W - 1, 0)))

  def shifted(j):  # the input W - 1 - j tokens earlier, 0 where it is of another document
    seen = window[:, j : j + T]
    if document is None:
      return seen
    return jnp.where((document[:, j : j + T] == index)[..., None], seen, 0)

  def convolution(kernel, offset):
    if offset is not None:  # moves weight from the present token to the one before
      offset = offset.astype(acc)
      kernel = kernel[0].astype(acc) + offset, kernel[1].astype(acc) - offset
    y = jnp.asarray(sum(kernel[j].astype(acc) * shifted(j) for j in range(W)))
    y = y if bias is None else y + bias.astype(acc)
    return (jax.nn.silu(y) if options.silu else y).astype(options.dtype)

  if offsets is None:
    y = [convolution(kernel, None) for kernel in kernels]
  else:  # the residuals are the arguments, not the taps of every token
    columns = jnp.split(offsets, len(kernels), axis=-1)
    y = map(jax.checkpoint(convolution), kernels, columns)
  return tuple(y), last_inputs(inputs)


def last_inputs(inputs: Inputs) -> ConvState:
  """The state after the last token: inputs of earlier documents are zero."""
  x, kernel, _, _, state, segments = inputs
  count = kernel.shape[1] - 1
  before = _before(x, state, kernel.shape[1])
  if count == 0:
    return ConvState(before)
  last = jnp.concatenate([before, x[:, -count:].astype(before.dtype)], axis=1)[:, -count:]
  if segments is None:
    return ConvState(last)
  document = jnp.pad(segments.index[:, -count:], ((0, 0), (count, 0)))[:, -count:]
  return ConvState(jnp.where((document == segments.index[:, -1:])[..., None], last, 0))


def _before(x, state, width):
  """[B, W - 1, D]: the inputs before the first token."""
  if state is not None:
    return state.inputs
  return jnp.zeros((x.shape[0], width - 1, x.shape[2]), accumulation_dtype(x))

"""The convolution as a sum of shifted inputs, which XLA makes one loop of."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.checks import accumulation_dtype


def shifted(x, kernel, bias, state, segments, *, silu, dtype):
  """(y, the last inputs).

  Args:
    x: [B, T, D].
    kernel, bias: [W, D], and [D] or None.
    state: the inputs before the first step, [B, W - 1, D]; None: zeros.
    segments: [B, T] counted from 0, or None.
    silu: whether y = z sigmoid(z) of the sum z.
    dtype: of y.
  """
  W, T, acc = len(kernel), x.shape[1], accumulation_dtype(x)
  before = _state(x, state, W)
  inputs = jnp.concatenate([before, x.astype(acc)], axis=1)
  # The segment of each of `inputs`: `state` is of the first.
  of_input = None if segments is None else jnp.pad(segments, ((0, 0), (W - 1, 0)))

  def visible(first):  # what each step sees of the step that is W - 1 - first earlier
    seen = inputs[:, first : first + T]
    if of_input is None:
      return seen
    return jnp.where((of_input[:, first : first + T] == segments)[..., None], seen, 0)

  y = sum(kernel[j].astype(acc) * visible(j) for j in range(W))
  if bias is not None:
    y = y + bias.astype(acc)
  y = jnp.asarray(y)
  y = jax.nn.silu(y) if silu else y
  return y.astype(dtype), last_inputs(x, state, segments, W)


def last_inputs(x, state, segments, width):
  """The last W - 1 inputs [B, W - 1, D], with zeros for those before the last segment."""
  count = width - 1
  before = _state(x, state, width)
  if count == 0:
    return before
  last = jnp.concatenate([before, x[:, -count:].astype(before.dtype)], axis=1)[:, -count:]
  if segments is None:
    return last
  of_last = jnp.pad(segments[:, -count:], ((0, 0), (count, 0)))[:, -count:]
  return jnp.where((of_last == segments[:, -1:])[..., None], last, 0)


def _state(x, state, width):
  B, _, D = x.shape
  return jnp.zeros((B, width - 1, D), accumulation_dtype(x)) if state is None else state

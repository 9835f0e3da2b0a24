"""The convolution with an array of taps: one FFT, or a tree of blocks. README.md derives both.

The convolution is bilinear, so its gradients are correlations: the residuals are `x` and the taps,
whose spectra the backward pass recomputes.
"""

import functools

import jax
import jax.numpy as jnp

from lnssm_jax.ops.causal_conv1d.types import ConvState
from lnssm_jax.ops.core.spmd import vary_alike
from lnssm_jax.ops.long_convolution.ordering import in_order, run_after, run_after_forward
from lnssm_jax.ops.long_convolution.types import Inputs, Options
from pallas_kernels.core.gradients import custom_vjp

_CHAIN = 8  # tokens per block at the bottom of the tree, computed lag by lag
_LONGEST_PRODUCT = 64  # tokens per half up to which a matrix product is used instead of an FFT


def fft(inputs: Inputs, options: Options):
  """One FFT of all tokens; packed documents as in `chunked`."""
  return _run(inputs, options, tree=inputs.segments is not None)


def chunked(inputs: Inputs, options: Options):
  """The tree of blocks: no output depends on a later input, not even in its last digit."""
  return _run(inputs, options, tree=True)


def _run(inputs, options, *, tree):
  x, kernel, state, segments = inputs
  acc, segments = options.acc, None if segments is None else segments.index
  x_dtype, x, taps = x.dtype, x.astype(acc), kernel.astype(acc)
  length, reach = x.shape[1], taps.shape[0] - 1
  taps_used = taps[: min(reach + 1, length)]
  if tree:
    out = convolve_in_blocks(x, taps_used, segments, length)
  elif taps_used.shape[0] == 1:
    out = taps_used * x
  else:
    out = _convolve(x, taps_used, 0, length)
  if state is not None and reach:
    out = _from_past(state.inputs, taps, segments, out)
  return run_after_forward(out).astype(x_dtype), _last_inputs(x, state, segments, reach)


def _from_past(past, taps, segments, out):
  """`out` [B, T, D] plus the contribution of the inputs before the first token.

  Inputs and tokens are grouped by their distance from the first token, doubling it: each FFT then
  sees taps of one scale of lags, and its error is relative to those even where taps decay fast. The
  nearest, which are all scales at once, are a product: a first document may be a few tokens long.
  """
  reach, length = past.shape[1], out.shape[1]
  if length == 1:
    return out + jnp.einsum("ld,bld->bd", jnp.flip(taps[1:], 0), past, precision="highest")[:, None]
  if segments is not None:
    reached = (segments == 0)[..., None]

  def add(out, near, far, first, last):
    """Adds the inputs at distances near + 1 ... far to the tokens first ... last - 1."""
    far, last = min(far, reach), min(last, reach, length)
    if far <= near or last <= first:
      return out
    (x, some), out = in_order((past[:, reach - far : reach - near], taps), out)
    if last <= _LONGEST_PRODUCT and far <= _LONGEST_PRODUCT:
      lags = jnp.arange(first, last)[:, None] + far - jnp.arange(far - near)
      some = jnp.pad(some, ((0, max(0, far + last - some.shape[0])), (0, 0)))[lags]
      added = jnp.einsum("tid,bid->btd", some, x, precision="highest")
    else:
      lag = near + 1 + first  # the smallest
      some = some[lag : far + last]
      added = _convolve(run_after(x, out.ravel()[0]), some, far - near - 1, last - first)
    if segments is not None:
      added = jnp.where(reached[:, first:last], added, 0)
    return out + jnp.pad(added, ((0, 0), (first, length - last), (0, 0)))

  size = _LONGEST_PRODUCT
  out = add(out, 0, size, 0, size)
  while size < reach:
    out = add(out, size, 2 * size, 0, 2 * size)
    out = add(out, 0, size, size, 2 * size)
    size *= 2
  return out


def _last_inputs(x, state, segments, reach):
  """The state after the last token."""
  batch, length, width = x.shape
  if segments is not None:
    x = jnp.where((segments == segments[:, -1:])[..., None], x, 0)
  if length >= reach:
    return ConvState(x[:, length - reach :])
  past = vary_alike((jnp.zeros((batch, reach, width), x.dtype), x))[0]
  if state is not None:
    past = state.inputs
    if segments is not None:
      past = jnp.where((segments[:, -1:] == 0)[..., None], past, 0)
  return ConvState(jnp.concatenate([past[:, length:], x], axis=1))


def convolve_in_blocks(x, taps, segments, size):
  """The convolution inside blocks of `size` tokens and inside documents: x [B, T, D], taps [L, D].

  `size` is a power of two, or at least T. One product or FFT per level adds the contribution of
  each block's first half to its second half; the halves are blocks themselves, down to `_CHAIN`.
  """
  half, length, reach = min(_CHAIN, size), x.shape[1], taps.shape[0] - 1
  out = _chains(half, x, taps, segments)
  while half < min(size, length) and reach:
    (x, taps), out = in_order((x, taps), out)
    out = out + jax.checkpoint(functools.partial(_level, half))(x, taps, segments, out.ravel()[0])
    half *= 2
  return out


def _chains(size, x, taps, segments):
  """The convolution inside blocks of `size` tokens, lag by lag."""
  length = x.shape[1]
  size = min(size, length)
  x = _cut(x, size)
  segments = None if segments is None else _cut(segments, size)[..., None]
  out = taps[0] * x
  for lag in range(1, min(size, taps.shape[0])):
    earlier = x[:, :, :-lag]
    if segments is not None:
      earlier = jnp.where(segments[:, :, :-lag] == segments[:, :, lag:], earlier, 0)
    out = out + jnp.pad(taps[lag] * earlier, ((0, 0), (0, 0), (lag, 0), (0, 0)))
  return _joined(out)[:, :length]


def _level(half, x, taps, segments, earlier):
  """Contribution of the first halves of blocks of 2 `half` tokens to their second halves.

  Two tokens of one document on either side of the middle share it with both tokens next to the
  middle: all other inputs and outputs are masked. Runs after the number `earlier` is computed.
  """
  length, reach = x.shape[1], taps.shape[0] - 1
  width = min(half, reach)  # tokens before the middle that reach beyond it, and tokens reached
  count = -(-(length - half) // (2 * half))  # blocks that have a second half
  left = _cut(x, 2 * half, count)[:, :, half - width : half]
  middle = None
  if segments is not None:
    segments = _cut(segments, 2 * half, count)
    before, after = segments[:, :, half - width : half], segments[:, :, half : half + width]
    middle = before[:, :, -1:] == after[:, :, :1]
    left = jnp.where(((before == before[:, :, -1:]) & middle)[..., None], left, 0)
    middle = ((after == after[:, :, :1]) & middle)[..., None]
  if width <= _LONGEST_PRODUCT:
    taps = jnp.pad(taps, ((0, max(0, 2 * width - taps.shape[0])), (0, 0)))
    steps = jnp.arange(width)
    lags = steps[:, None] + width - steps
    right = jnp.einsum("pid,bnid->bnpd", taps[lags], left, precision="highest")
  else:
    right = _convolve(run_after(left, earlier), taps[1 : 2 * width], width - 1, width)
  if middle is not None:
    right = jnp.where(middle, right, 0)
  right = jnp.pad(right, ((0, 0), (0, 0), (half, half - width), (0, 0)))
  right = _joined(right)[:, :length]
  return jnp.pad(right, ((0, 0), (0, length - right.shape[1]), (0, 0)))


def _cut(x, size, count=None):
  """[B, T, ...] -> [B, count, size, ...], padded with zeros or without the last tokens."""
  count = -(-x.shape[1] // size) if count is None else count
  x = x[:, : count * size]
  x = jnp.pad(x, ((0, 0), (0, count * size - x.shape[1]), *((0, 0),) * (x.ndim - 2)))
  return x.reshape(x.shape[0], count, size, *x.shape[2:])


def _joined(x):
  return x.reshape(x.shape[0], -1, x.shape[-1])


def fast_length(length: int) -> int:
  """The smallest even size >= `length` without prime factors above 5.

  An FFT of a size with a large prime factor takes several times as long, by Bluestein's algorithm,
  and is less accurate.
  """
  best = 2 * length
  for fives in (5**i for i in range(10)):
    for threes in (3**i for i in range(15)):
      size = 2 * fives * threes
      while size < length:
        size *= 2
      best = min(best, size)
  return best


@functools.partial(custom_vjp, nondiff_argnums=(2, 3))
def _convolve(x, taps, start, length):
  """Tokens `start` to `start + length` of the convolution of x [..., P, D] and taps [Q, D].

  Outputs beyond the size of the FFT wrap around to its beginning, before `start`.
  """
  size = _size(x, taps, start, length)
  x, taps = _rffts(size, x, taps)
  return _irffts(size, x * taps)[0][..., start : start + length, :]


def _size(x, taps, start, length):
  full = x.shape[-2] + taps.shape[-2] - 1
  return fast_length(max(start + length, full - start, x.shape[-2], taps.shape[-2]))


def _forward(x, taps, start, length):
  return _convolve(x, taps, start, length), (x, taps)


@jax.named_scope("long_convolution")
def _backward(start, length, residuals, d_out):
  x, taps = residuals
  size = _size(x, taps, start, length)
  before = ((0, 0),) * (d_out.ndim - 2) + ((start, 0), (0, 0))
  d_out, x_hat, taps_hat = _rffts(size, jnp.pad(d_out, before), x, taps)
  d_taps = (jnp.conj(x_hat) * d_out).sum(tuple(range(x.ndim - 2)))
  d_x, d_taps = _irffts(size, d_out * jnp.conj(taps_hat), d_taps)
  return d_x[..., : x.shape[-2], :], d_taps[: taps.shape[0]]


_convolve.defvjp(_forward, _backward)


def _rffts(size, *arrays):
  """Real FFTs of arrays [..., T, D] along T, one after the other."""
  return _one_by_one(lambda x: jnp.fft.rfft(x, size, axis=-2), arrays)


def _irffts(size, *spectra):
  """Inverse real FFTs, one after the other."""
  return _one_by_one(lambda x: jnp.fft.irfft(x, size, axis=-2), spectra)


def _one_by_one(transform, arrays):
  done = [transform(arrays[0])]
  for x in arrays[1:]:
    done.append(transform(run_after(x, done[-1].real.ravel()[0])))
  return done

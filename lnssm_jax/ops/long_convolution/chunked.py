"""The convolution with a sum of exponentials, as a recurrence over chunks; README.md derives it.

Every power of a pole is computed from its logarithm, also those that carry the state across chunks:
none is a product of others, whose rounding errors would accumulate along time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.core.chunking import chunk_of, scan_constant_decay
from lnssm_jax.ops.long_convolution.exponentials import exponentials, parts, read_parts, whole
from lnssm_jax.ops.long_convolution.taps import convolve_in_blocks
from lnssm_jax.ops.long_convolution.types import ExponentialState, Inputs, Options
from pallas_kernels.core.gradients import custom_vjp

_GROUP = 256  # chunks whose contributions to a gradient are summed first


def chunked(inputs: Inputs, options: Options):
  """Taps inside chunks, states between them."""
  x, kernel, state, segments = inputs
  size = options.chunk_size
  if size is None:
    # The states between chunks are then no larger than x, up to N = 64.
    size = 64 if kernel.log_pole.shape[1] <= 32 else 128
  size = chunk_of(size, x.shape[1])
  # The residuals are the arguments; the backward pass recomputes the states between chunks.
  run = jax.checkpoint(functools.partial(_chunked, size, options.acc))
  out, h = run(x, kernel, state, None if segments is None else segments.index)
  return out, ExponentialState(h)


def associative(inputs: Inputs, options: Options):
  """Chunks of one token: the scan over chunks, of depth log T, runs over all tokens."""
  return chunked(inputs, options._replace(chunk_size=1))


def _chunked(size, acc, x, kernel, state, segments):
  out_dtype, x = x.dtype, x.astype(acc)
  powers = exponentials(kernel.log_pole, range(size + 1))
  read = read_parts(kernel.coefficient * powers)
  taps = read[:size, :, : kernel.log_pole.shape[1]].sum(-1)
  if kernel.direct is not None:
    taps = taps.at[0].add(kernel.direct)
  carried, h = _carried(size, x, kernel.log_pole, powers, read[1:], state, segments)
  out = carried + convolve_in_blocks(x, taps, segments, size)
  return out.astype(out_dtype), h


def _carried(size, x, log_pole, powers, read, state, segments):
  """Contribution of the states that enter the chunks to the outputs, and the final state.

  powers [C + 1, D, N]; read [C, D, N or 2 N], the weights with which a chunk reads such a state.
  """
  batch, length, width = x.shape
  count = -(-length // size)
  rest = length - (count - 1) * size  # tokens in the last chunk
  x = jnp.pad(x, ((0, 0), (0, count * size - length), (0, 0))).reshape(batch, count, size, width)

  reached = before = same = None
  if segments is not None:
    padding = ((0, 0), (0, count * size - length))
    segments = jnp.pad(segments, padding, mode="edge").reshape(batch, count, size)
    # The segment of the state that enters a chunk, and of the one that leaves it.
    before = jnp.pad(segments[:, :-1, -1], ((0, 0), (1, 0)))[..., None]
    reached = (segments == before)[..., None]
    x = jnp.where((segments == segments[..., -1:])[..., None], x, 0)
    same = (before[..., 0] == segments[..., -1])[..., None, None]

  def summary(x, tokens):
    """The state after `tokens` tokens of each chunk, starting from zero: [B, chunks, D, N]."""
    weights = parts(jnp.flip(powers[:tokens], 0))
    added = jnp.einsum("sdn,bcsd->bcdn", weights, x[:, :, :tokens], precision="highest")
    return whole(added, powers)

  first = jnp.zeros((batch, *powers.shape[1:]), powers.dtype) if state is None else state.h
  entering = first[:, None]
  if count > 1:
    added = jnp.concatenate([entering, summary(x[:, :-1], size)], axis=1)
    keep = None if same is None else jnp.pad(same[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
    entering = _over_chunks(size, log_pole, keep, added)
  kept = powers[rest] * entering[:, -1]
  kept = kept if same is None else jnp.where(same[:, -1], kept, 0)
  last = kept + summary(x[:, -1:], rest)[:, 0]

  # Each group of chunks has its own copy of `read`: its gradient sums per group first.
  entering = _grouped(parts(entering))
  read = jnp.broadcast_to(read, (entering.shape[1], *read.shape))
  out = jnp.einsum("gsdn,bgcdn->bgcsd", read, entering, precision="highest")
  out = out.reshape(batch, -1, size, width)[:, :count]
  out = out if reached is None else jnp.where(reached, out, 0)
  return out.reshape(batch, -1, width)[:, :length], last


def _grouped(x):
  """[B, chunks, ...] -> [B, groups, chunks per group, ...], padded with zeros.

  A sequential float32 sum of 131,072 terms loses a digit that a sum of sums keeps.
  """
  count = x.shape[1]
  size = min(count, _GROUP)
  x = jnp.pad(x, ((0, 0), (0, -count % size), *((0, 0),) * (x.ndim - 2)))
  return x.reshape(x.shape[0], -1, size, *x.shape[2:])


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _over_chunks(size, log_pole, keep, x):
  """h_n = exp(size log_pole) h_{n-1} + x_n along axis 1, without h_{n-1} where `keep` is False."""
  return scan_constant_decay(_decays(size, log_pole, x), keep, x)


def _forward(size, log_pole, keep, x):
  h = _over_chunks(size, log_pole, keep, x)
  return h, (log_pole, keep, h)


@jax.named_scope("long_convolution")
def _backward(size, residuals, d_h):
  """The same recurrence backwards in time: d x_n = d h_n + exp(size log_pole) d x_{n+1}."""
  log_pole, keep, h = residuals
  decays = _decays(size, log_pole, h)
  keep_next = None if keep is None else jnp.flip(jnp.roll(keep, -1, axis=1), 1)
  d_x = jnp.flip(scan_constant_decay(decays, keep_next, jnp.flip(d_h, 1)), 1)
  products = d_x[:, 1:] * h[:, :-1]
  products = products if keep is None else jnp.where(keep[:, 1:], products, 0)
  d_log_pole = size * decays[0] * _grouped(products).sum(2).sum((0, 1))
  no_gradient = None if keep is None else np.zeros(keep.shape, jax.dtypes.float0)
  return d_log_pole, no_gradient, d_x


_over_chunks.defvjp(_forward, _backward)


def _decays(size, log_pole, x):
  """exp(size log_pole), exp(2 size log_pole), exp(4 size log_pole), ..."""
  doublings = (x.shape[1] - 1).bit_length()
  return list(exponentials(log_pole, tuple(size << i for i in range(doublings))))

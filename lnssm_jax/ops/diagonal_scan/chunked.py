"""The diagonal recurrence as an associative scan and in chunks; README.md derives both.

One backward pass serves both forms: the same recurrence in the other direction. The residuals are
the decay and h, which is the output itself where that is float32; x is not needed.

Every array keeps its own dtype until its chunk is computed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.core.chunking import over_chunks, scan_constant_decay, shift
from lnssm_jax.ops.core.precision import binary_powers
from lnssm_jax.ops.core.spmd import vary_alike
from lnssm_jax.ops.diagonal_scan.types import DiagonalState, Inputs, Options
from pallas_kernels.core.gradients import custom_vjp

# On CPUs XLA fuses the multiply-adds of a chunk into one pass over memory (measured in README.md).
# On accelerators such a chain would cost parallelism: fewer, longer chunks, with a scan of
# logarithmic depth inside.
_CPU_CHUNK_SIZE = 16
_ACCELERATOR_CHUNK_SIZE = 512
_LONGEST_CHAIN = 32


class _Static(NamedTuple):
  """Static arguments of the compiled program."""

  chunk_size: int
  chain: bool  # inside a chunk: token by token, or by an associative scan
  reverse: bool
  out_dtype: jnp.dtype


def chunked(inputs: Inputs, options: Options):
  """A `lax.scan` over chunks."""
  size = options.chunk_size
  if size is None:
    size = _CPU_CHUNK_SIZE if jax.default_backend() == "cpu" else _ACCELERATOR_CHUNK_SIZE
  return _run(size, size <= _LONGEST_CHAIN, inputs, options)


def associative(inputs: Inputs, options: Options):
  """`jax.lax.associative_scan` over all tokens: depth log T."""
  return _run(inputs.x.shape[1], False, inputs, options)


def _run(chunk_size, chain, inputs, options):
  static = _Static(chunk_size, chain, options.reverse, jnp.dtype(options.out_dtype))
  keep = inputs.keep(reverse=options.reverse)
  out, last = _scan(static, inputs.decay, inputs.x, inputs.state.h, keep)
  return out, DiagonalState(last)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _scan(static, decay, x, initial, keep):
  """h [B, T, D] in `out_dtype`, and the last one in that of `initial`."""
  return _states(static, decay, x, initial, keep, static.out_dtype)


def _states(static, decay, x, initial, keep, dtype):
  def chunk(carry, by_token, _):
    decay, keep, x = by_token
    decay, x = _wide(decay, carry), x.astype(carry.dtype)
    first, last = (-1, 0) if static.reverse else (0, -1)
    x = x.at[:, first].add(_decayed(decay, keep, first, carry))
    h = _scan_chunk(decay, keep, x, chain=static.chain, reverse=static.reverse)
    return h[:, last], (h.astype(dtype), ())

  size, reverse = static.chunk_size, static.reverse
  last, h, _ = over_chunks(chunk, initial, (decay, keep, x), size=size, reverse=reverse)
  return h, last


def _forward(static, decay, x, initial, keep):
  h, last = _states(static, decay, x, initial, keep, initial.dtype)
  # Of x the backward pass needs only the dtype, which an empty array carries.
  residuals = decay, jnp.zeros((0,), x.dtype), initial, keep, h
  return (h.astype(static.out_dtype), last), residuals


@jax.named_scope("diagonal_scan")
def _backward(static, residuals, cotangents):
  d_h, d_last = cotangents
  decay, x_like, initial, keep, h = residuals
  other_way = static._replace(reverse=not static.reverse)

  def chunk(carry, by_token, _):  # carry: the cotangent of the state that leaves the chunk
    decay, keep, d_h = by_token
    decay = _wide(decay, carry)
    first, last = (-1, 0) if other_way.reverse else (0, -1)
    d_h = d_h.astype(carry.dtype).at[:, first].add(carry)
    next_decay, next_keep = (shift(y, static.reverse) for y in (decay, keep))
    adjoint = _scan_chunk(next_decay, next_keep, d_h, chain=static.chain, reverse=other_way.reverse)
    return _decayed(decay, keep, last, adjoint[:, last]), (adjoint, ())

  d_last = vary_alike((d_last, d_h))[0]
  size, reverse = static.chunk_size, other_way.reverse
  adjoint = over_chunks(chunk, d_last, (decay, keep, d_h), size=size, reverse=reverse)[1]
  before = shift(h, not static.reverse, initial)
  if keep is not None:
    before = jnp.where(keep, before, 0)
  d_decay = _as(decay, adjoint * before)
  shared = tuple(i for i, size in enumerate(decay.shape) if size == 1)
  d_decay = d_decay.sum(shared, keepdims=True) if decay.shape != h.shape else d_decay
  first = -1 if static.reverse else 0
  d_initial = _decayed(_wide(decay, h), keep, first, adjoint[:, first])
  no_gradient = None if keep is None else np.zeros(keep.shape, jax.dtypes.float0)
  return d_decay, _as(x_like, adjoint), d_initial.astype(initial.dtype), no_gradient


_scan.defvjp(_forward, _backward)


def _scan_chunk(decay, keep, x, *, chain, reverse):
  """The recurrence from an empty state, inside one chunk; `decay` of the first token is not read.

  The three arrays agree in rank; axes after time may have size 1 in `decay` and `keep`.
  """
  if chain:
    return _chain(decay, keep, x, reverse)
  if decay.shape[1] == 1:
    flip = (lambda y: jnp.flip(y, 1)) if reverse else (lambda y: y)
    powers = binary_powers(decay, x.shape[1].bit_length())
    keep = None if keep is None else flip(keep)
    return flip(scan_constant_decay(powers, keep, flip(x)))
  if keep is None:

    def combine(left, right):
      return left[0] * right[0], right[0] * left[1] + right[1]

    elements = (decay, x)
  else:

    def combine(left, right):
      kept = jnp.where(right[2], right[0] * left[1], 0)
      return left[0] * right[0], kept + right[1], left[2] & right[2]

    elements = (decay, x, keep)
  return jax.lax.associative_scan(combine, elements, axis=1, reverse=reverse)[1]


def _chain(decay, keep, x, reverse):
  """Token by token."""
  order = list(range(x.shape[1]))[:: -1 if reverse else 1]
  results = [x[:, order[0]]]
  for t in order[1:]:
    results.append(_decayed(decay, keep, t, results[-1]) + x[:, t])
  return jnp.stack(results[:: -1 if reverse else 1], axis=1)


def _decayed(decay, keep, t, h):
  """decay_t h, and 0 where the state is reset before token t: even one that is not finite."""
  decayed = decay[:, 0 if decay.shape[1] == 1 else t] * h
  return decayed if keep is None else jnp.where(keep[:, t], decayed, 0)


def _wide(decay, like):
  """The decay in the precision of the sums, real if it is real."""
  return decay.astype(jnp.result_type(decay, jnp.finfo(like.dtype).dtype))


def _as(like, x):
  """x in the dtype of `like`: of a real argument, the gradient is the real part."""
  real = not jnp.issubdtype(like.dtype, jnp.complexfloating)
  return (x.real if real else x).astype(like.dtype)

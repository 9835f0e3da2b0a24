"""Softmax attention on the Mosaic-GPU kernels: which arguments they support, and how they run them.

Import this module where it is needed only (see `dispatch.Kernels`).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lnssm_jax.ops.attention.types import Inputs, Mask, Options
from lnssm_jax.ops.core.segments import Segments
from pallas_kernels.attention import config, op
from pallas_kernels.attention.types import Logits, Range, Ranges

_NARROWEST = 32  # narrower heads are padded more than twofold


def unsupported(inputs: Inputs, options: Options) -> str | None:
  """Why the kernels cannot run these arguments on any device, or None."""
  q, k, v, state, _, dropout_keys = inputs
  if state is not None:
    return "initial_state is given, and the kernels read no cache"
  if dropout_keys is not None:
    return f"dropout={options.dropout}, and the kernels drop nothing"
  for name, x in (("q", q), ("k", k), ("v", v)):
    if x.dtype != jnp.bfloat16:
      return f"{name} has dtype {x.dtype}, and the tensor cores multiply bfloat16 only"
    if x.shape[-1] > config.WIDTHS[-1]:
      return f"{name} is {x.shape[-1]} wide, and at most {config.WIDTHS[-1]} is supported"
  if options.chunk_size is not None:
    return f"chunk_size={options.chunk_size}, and the kernels' tiles have sizes of their own"
  return None


def preferred(inputs: Inputs, options: Options) -> bool:
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these."""
  del options
  return inputs.q.shape[1] > 1 and min(inputs.q.shape[-1], inputs.v.shape[-1]) >= _NARROWEST


def run(inputs: Inputs, options: Options, *, sizes=None, interpret=None) -> tuple[jax.Array]:
  """(out,). `sizes`: the configuration of the kernels; None takes that of the table."""
  q, k, v, _, segments, _ = inputs
  (B, T, _, K), V = q.shape, v.shape[-1]
  length = config.padded_length(T)
  wide_k, wide_v = config.padded_width(K), config.padded_width(V)

  def padded(x, width):
    return jnp.pad(x, ((0, 0), (0, length - T), (0, 0), (0, width - x.shape[-1])))

  ranges = key_ranges(options.mask, segments, B, T)
  # Padding sees nothing and nobody sees it; its empty ranges follow all others.
  ranges = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, length - T)), constant_values=T), ranges)
  shape = config.Shape(wide_k, wide_v)
  sizes = sizes or config.default(shape)
  sizes.check(shape)
  static = op.Options(Logits(options.scale, options.soft_cap), sizes, interpret)
  arrays = padded(q, wide_k), padded(k, wide_k), padded(v, wide_v)
  return (op.attention(*arrays, ranges, static)[:, :T, :, :V],)


def key_ranges(mask: Mask, segments: Segments | None, batch: int, length: int) -> Ranges:
  """The tokens that each token sees, and those that see it: each is a range."""
  token = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
  start, stop = jnp.zeros_like(token), jnp.full_like(token, length)
  if segments is not None:
    start, stop = segments.bounds(token)
  if mask.window is not None:
    # Documents come first: a window may be longer than any sequence, and a sum would overflow.
    reach = min(mask.window, length)
    start, stop = jnp.maximum(start, token + 1 - reach), jnp.minimum(stop, token + reach)
  if mask.block is not None:
    size = min(mask.block, length)
    begin = token - (token - start) % size
    start, stop = begin, jnp.minimum(stop, begin + size)
  if mask.causal:
    return Ranges(seen=Range(start, token + 1), seen_by=Range(token, stop))
  return Ranges(seen=Range(start, stop), seen_by=Range(start, stop))


interpreted = functools.partial(run, interpret=plgpu.InterpretGPUParams(detect_races=True))

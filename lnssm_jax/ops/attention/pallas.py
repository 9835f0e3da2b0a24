"""Softmax attention on the Mosaic-GPU kernels: which arguments they support, and how they run them.

Import this module where it is needed only (see `dispatch.Kernels`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.attention.chunked import chunked
from lnssm_jax.ops.attention.types import AttentionState, Inputs, Mask, Options
from lnssm_jax.ops.core import single_step
from lnssm_jax.ops.core.segments import Segments, positions
from pallas_kernels.attention import config, decode, op
from pallas_kernels.attention.dropout import Dropout
from pallas_kernels.attention.types import Logits, Range, Ranges
from pallas_kernels.core import device

_NARROWEST = 32  # narrower heads are padded more than twofold


def unsupported(inputs: Inputs, options: Options) -> str | None:
  """Why the kernels cannot run these arguments on any device, or None."""
  q, k, v, *_ = inputs
  if options.chunk_size is not None:
    return f"chunk_size={options.chunk_size}, and the kernels' tiles have sizes of their own"
  if _decodes(inputs, options):
    return None
  for name, x in (("q", q), ("k", k), ("v", v)):
    if x.dtype != jnp.bfloat16:
      return f"{name} has dtype {x.dtype}, and the tensor cores multiply bfloat16 only"
    if x.shape[-1] > config.WIDTHS[-1]:
      return f"{name} is {x.shape[-1]} wide, and at most {config.WIDTHS[-1]} is supported"
  return None


def unsupported_ampere(inputs: Inputs, options: Options) -> str | None:
  """`unsupported`, by the kernels for all GPUs since Ampere."""
  if inputs.dropout_keys is not None:
    return f"dropout={options.dropout}, and only Hopper's kernels drop weights"
  widest = config.WIDEST_AMPERE
  if not _decodes(inputs, options):
    for name, x in (("q", inputs.q), ("v", inputs.v)):
      if x.shape[-1] > widest:
        return (
          f"{name} is {x.shape[-1]} wide, and at most {widest} is supported by the kernels for "
          "every GPU since Ampere"
        )
  return unsupported(inputs, options)


def preferred(inputs: Inputs, options: Options) -> bool:
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these."""
  if inputs.q.shape[1] == 1:
    return _decodes(inputs, options)
  return min(inputs.q.shape[-1], inputs.v.shape[-1]) >= _NARROWEST


def _decodes(inputs: Inputs, options: Options) -> bool:
  """Whether `decode` runs these arguments."""
  q, state = inputs.q, inputs.state
  if q.shape[1] != 1 or state is None or options.mask.block or inputs.dropout_keys is not None:
    return False
  return decode.unsupported(q[:, 0], state.k, state.v) is None


def _step(inputs: Inputs, *, options: Options, interpret) -> jax.Array:
  """A single token by `decode`."""
  q, k, v, state, _, _, sinks = inputs
  assert state is not None
  # A window's cache has the tokens that the next one sees, and no other.
  held = jnp.minimum(state.position, state.k.shape[1])
  logits = Logits(options.scale, options.soft_cap)
  arrays = q[:, 0], k[:, 0], v[:, 0], state.k, state.v, held
  out = decode.decode(*arrays, logits=logits, sinks=sinks, interpret=interpret)
  return out[:, None]


def run(
  inputs: Inputs,
  options: Options,
  *,
  sizes=None,
  interpret=None,
  architecture: str | None = None,
) -> tuple[jax.Array]:
  """(out,).

  Args:
    sizes: the configuration of the kernels; None takes that of the table.
    architecture: whose kernels run; None takes those of the device.
  """
  if _decodes(inputs, options):
    return (single_step.run(_step, chunked, inputs, options, interpret=interpret),)
  q, k, v, state, segments, dropout_keys, sinks = inputs
  (B, T, H, K), V = q.shape, v.shape[-1]
  before = None
  if state is not None:
    before = Before(state.position, state.k.shape[1])
    both = zip((state.k, state.v), (k, v), strict=True)
    k, v = (jnp.concatenate([in_order(old, state.position), new], 1) for old, new in both)
  S = k.shape[1]
  wide_k, wide_v = config.padded_width(K), config.padded_width(V)

  def padded(x, width):
    more = config.padded_length(x.shape[1]) - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, width - x.shape[-1])))

  def padded_range(bounds, others):
    # Padding sees at most padding and nobody else sees it; its ranges follow all others.
    pad = lambda x: jnp.pad(
      x, ((0, 0), (0, config.padded_length(x.shape[1]) - x.shape[1])), constant_values=others
    )
    return Range(*(None if x is None else pad(x) for x in bounds))

  seen, seen_by, _ = key_ranges(options.mask, segments, B, T, before)
  dropout = None
  if dropout_keys is not None:
    more = lambda length: config.padded_length(length) - length
    pad = lambda x: jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, more(x.shape[-1])),))
    dropout = jax.tree.map(pad, _dropout(dropout_keys, state, segments))
  ranges = Ranges(padded_range(seen, S), padded_range(seen_by, T), dropout)
  shape = config.Shape(wide_k, wide_v, B * H * (config.padded_length(T) // config.TILE))
  architecture = device.running(architecture)
  ampere = architecture == device.AMPERE
  sizes = sizes or (config.AmpereConfig() if ampere else config.default(shape))
  sizes.check(shape)
  logits = Logits(options.scale, options.soft_cap, options.dropout if dropout else 0.0)
  static = op.Options(logits, sizes, interpret, architecture)
  arrays = padded(q, wide_k), padded(k, wide_k), padded(v, wide_v)
  sinks = None if sinks is None else sinks.astype(jnp.float32)
  return (op.attention(*arrays, ranges, static, sinks)[:, :T, :, :V],)


class Before(NamedTuple):
  """The tokens of a cache, which come before those of a call."""

  position: jax.Array  # [B], how many tokens of the first document there were
  room: int  # how many of them the cache has


def in_order(cache: jax.Array, position: jax.Array) -> jax.Array:
  """A cache [B, M, G, X] in the order of its tokens, those of empty slots first."""
  room = cache.shape[1]
  slot = (position[:, None] - room + jnp.arange(room, dtype=jnp.int32)) % max(room, 1)
  return cache[jnp.arange(cache.shape[0])[:, None], slot]


def _dropout(keys: jax.Array, state: AttentionState | None, segments: Segments | None) -> Dropout:
  """The masks, from the queries' keys [B, T, H, 2]."""
  B, T = keys.shape[:2]
  words = jax.lax.bitcast_convert_type(jnp.moveaxis(keys, 1, 2), jnp.int32)
  position = positions(segments, B, T, None if state is None else state.position)
  room = 0 if state is None else state.k.shape[1]
  of_keys = position
  if state is not None:
    cached = state.position[:, None] - room + jnp.arange(room, dtype=jnp.int32)
    of_keys = jnp.concatenate([cached, position], axis=1)
  start = room + jnp.arange(T, dtype=jnp.int32) - position
  return Dropout((words[..., 0], words[..., 1]), start, of_keys)


def key_ranges(
  mask: Mask, segments: Segments | None, batch: int, length: int, before: Before | None = None
) -> Ranges:
  """The keys that each query sees, and the queries that see each key: each is a range.

  The keys are those of a cache in their order, if there is one (only with a causal mask), and then
  those of the queries' tokens.
  """
  token = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
  start, stop = jnp.zeros_like(token), jnp.full_like(token, length)
  if segments is not None:
    start, stop = segments.bounds()
  if before is None:
    start, stop = _within(mask, token, start, stop, length)
    if mask.causal:
      return Ranges(seen=Range(start, None), seen_by=Range(None, stop))
    return Ranges(seen=Range(start, stop), seen_by=Range(start, stop))
  # Tokens of the cache have numbers below 0.
  room, first = before.room, -before.position[:, None]
  start = jnp.where(start == 0, first, start)
  cached = jnp.broadcast_to(jnp.arange(-room, 0, dtype=jnp.int32), (batch, room))
  _, end = _within(mask, cached, first, stop[:, :1], length + room)
  end = jnp.where(cached >= first, jnp.maximum(end, 0), 0)  # none sees an empty slot
  start, stop = _within(mask, token, start, stop, length + room)
  of_keys = Range(jnp.zeros_like(cached), end), Range(token, stop)
  return Ranges(
    seen=Range(jnp.maximum(start + room, 0), token + room + 1),
    seen_by=Range(*(jnp.concatenate(x, axis=1) for x in zip(*of_keys, strict=True))),
  )


def _within(mask: Mask, token, start, stop, length: int) -> tuple[jax.Array, jax.Array]:
  """The part of documents [start, stop) that tokens are in one window or block with."""
  if mask.window is not None:
    # Documents come first: a window may be longer than any sequence, and a sum would overflow.
    reach = min(mask.window, length)
    start, stop = jnp.maximum(start, token + 1 - reach), jnp.minimum(stop, token + reach)
  if mask.block is not None:
    size = min(mask.block, length)
    begin = token - (token - start) % size
    start, stop = begin, jnp.minimum(stop, begin + size)
  return start, stop

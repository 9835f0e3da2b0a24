"""The diagonal scan's kernels. One thread per channel; each array is read and written once."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.core import boundaries
from pallas_kernels.core import channel_grid as grid
from pallas_kernels.core.wgmma import Backend, with_int32_indices
from pallas_kernels.diagonal_scan.config import GROUP
from pallas_kernels.diagonal_scan.numbers import Parts, add, conjugate, times

# Forward kernel


class _ForwardStreams(NamedTuple):
  x: Parts  # [T, 128]
  decay: Parts  # [T, 128], or () for a constant


class _ForwardInputs(NamedTuple):
  streams: _ForwardStreams
  constant_decay: Parts  # [D], or ()
  initial: Parts | None
  first: Any


class ForwardResults(NamedTuple):
  """Parts of arrays; () where an array is not computed."""

  last: Parts  # [B, P, D] float32, the state after each split
  out: Parts  # [B, T, D], h in the dtype of a real x and float32 if complex
  decay_product: Parts  # [B, P, D] float32, of each split; 0 where a document begins in it


@with_int32_indices
def forward_kernel(
  decay: tuple[jax.Array, ...],  # parts [B, T, D], or [D] float32 for a constant
  x: tuple[jax.Array, ...],  # parts [B, T, D]
  initial: tuple[jax.Array, ...] | None,  # parts [B, P, D] float32; None: zeros
  first: jax.Array | None,  # [B, T]
  *,
  reverse: bool,
  length: int,
  num_splits: int,
  config: grid.PipelineConfig,
  backend: Backend,
  outputs: bool = True,
) -> ForwardResults:
  """Scans P independent splits of the sequence; without `outputs` only `last` and `decay_product`.

  Tokens from `length` on are padding, where a constant decay counts as 1.
  """
  B, T, D = x[0].shape
  P, split_length = num_splits, T // num_splits
  width = max(len(decay), len(x))
  is_constant = decay[0].ndim == 1
  end = length if length < T else None
  out_dtype = x[0].dtype if width == 1 else jnp.float32
  out_dtypes = (out_dtype,) * width if outputs else ()
  streams = _ForwardStreams(x, () if is_constant else decay)
  split_state = jax.ShapeDtypeStruct((B, P, D), jnp.float32)
  out_type = ForwardResults(
    last=(split_state,) * width,
    out=tuple(jax.ShapeDtypeStruct((B, T, D), dtype) for dtype in out_dtypes),
    decay_product=() if outputs else (split_state,) * len(decay),
  )

  def body(ins, outs, out_smem):
    at, b, split = grid.coordinates(P)
    constant = [grid.load_row(ref.at[at]) for ref in ins.constant_decay]
    h = [grid.full_row(0.0)] * width
    if ins.initial is not None:
      h = [grid.load_row(ref.at[b, split, at]) for ref in ins.initial]
    product = [grid.full_row(1.0)] + [grid.full_row(0.0)] * (len(decay) - 1)

    def compute_chunk(first_token, streams_smem, is_first, out_smem, carry):
      h, product = carry
      is_padding = lambda t: None if end is None else first_token + t >= end
      for group in _groups(config.chunk, reverse):
        xs = {t: _load(streams_smem.x, t) for t in group}
        if is_constant:
          decays = {t: _padded(constant, 1.0, is_padding(t)) for t in group}
        else:
          decays = {t: _load(streams_smem.decay, t) for t in group}
        hs = {}
        for t in group:
          if is_first is not None:
            h = boundaries.reset(is_first(t), h, _real(0.0, h))
            if not outputs:
              product = boundaries.reset(is_first(t), product, _real(0.0, product))
          h = backend.materialize(add(times(decays[t], h), xs[t]))
          product = None if outputs else times(decays[t], product)
          hs[t] = h
        if outputs:
          for t in group:
            _store(out_smem, t, hs[t])
      return h, product

    h, product = grid.pipeline(
      compute_chunk,
      (h, None if outputs else product),
      config=config,
      streams_gmem=jax.tree.map(lambda ref: ref.at[b, :, at], ins.streams),
      first_gmem=None if ins.first is None else ins.first.at[b],
      results_smem=out_smem,
      results_gmem=tuple(ref.at[b, :, at] for ref in outs.out),
      start=split * split_length,
      num_chunks=split_length // config.chunk,
      reverse=reverse,
      backend=backend,
    )
    for ref, y in zip(outs.last, h, strict=True):
      grid.store_row_gmem(ref.at[b, split, at], y)
    for ref, y in zip(outs.decay_product, product or (), strict=True):
      grid.store_row_gmem(ref.at[b, split, at], y)

  words = boundaries.pack_bits(first, config.chunk)
  inputs = _ForwardInputs(streams, decay if is_constant else (), initial, words)
  smem = tuple(grid.result_smem(config.chunk, dtype) for dtype in out_dtypes)
  return grid.launch("diagonal_scan_forward", body, inputs, out_type, smem, (B, D, P), backend)


# Backward kernel


class _BackwardStreams(NamedTuple):
  d_out: Parts  # [T, 128]
  decay: Parts  # [T, 128], or () for a constant
  h: Parts  # [T, 128], or () in the first pass over splits


class _BackwardOutputs(NamedTuple):
  """Gradients per token, in SMEM."""

  d_x: Parts
  d_decay: Parts  # () for a constant


class _BackwardInputs(NamedTuple):
  streams: _BackwardStreams
  constant_decay: Parts
  out: Parts | None
  initial: Parts | None
  d_last: Parts | None
  first: Any


class BackwardResults(NamedTuple):
  """Parts of arrays; () where an array is not computed."""

  d_initial: Parts  # [B, P, D] float32, the cotangent of the state before each split
  d_x: Parts  # [B, T, D] in `x_dtype`
  d_decay: Parts  # [B, T, D] in the dtype of decay; for a constant [B, P, D] float32 sums


@with_int32_indices
def backward_kernel(
  decay: tuple[jax.Array, ...],  # parts [B, T, D], or [D] float32 for a constant
  d_out: tuple[jax.Array, ...],  # parts [B, T, D]
  out: tuple[jax.Array, ...] | None,  # parts [B, T, D] of h; None: only `d_initial` is wanted
  initial: tuple[jax.Array, ...] | None,  # parts [B, D] float32, the state before the first token
  d_last: tuple[jax.Array, ...] | None,  # parts [B, P, D] float32; None: zeros
  first: jax.Array | None,  # [B, T]
  *,
  reverse: bool,
  length: int,
  num_splits: int,
  config: grid.PipelineConfig,
  backend: Backend,
  x_dtype: Any = None,
  x_is_real: bool = False,
) -> BackwardResults:
  """Scans P independent splits against the direction of the forward pass, which is `reverse`.

  `d_last` is the cotangent of the state after each split.
  """
  B, T, D = d_out[0].shape
  P, split_length = num_splits, T // num_splits
  width = len(d_out)
  is_constant = decay[0].ndim == 1
  end = length if length < T else None
  gradients = out is not None
  streams = _BackwardStreams(d_out, () if is_constant else decay, out or ())
  dtypes = _BackwardOutputs((), ())
  if gradients:
    d_x_dtypes = (x_dtype,) * (1 if x_is_real else width)
    dtypes = _BackwardOutputs(d_x_dtypes, () if is_constant else tuple(y.dtype for y in decay))
  split_state = jax.ShapeDtypeStruct((B, P, D), jnp.float32)
  token_type = lambda dtype: jax.ShapeDtypeStruct((B, T, D), dtype)
  out_type = BackwardResults(
    d_initial=(split_state,) * width,
    d_x=tuple(map(token_type, dtypes.d_x)),
    d_decay=tuple(map(token_type, dtypes.d_decay)),
  )
  if gradients and is_constant:
    out_type = out_type._replace(d_decay=(split_state,) * len(decay))

  def body(ins, outs, results_smem):
    at, b, split = grid.coordinates(P)
    constant = [grid.load_row(ref.at[at]) for ref in ins.constant_decay]
    p = [grid.full_row(0.0)] * width
    if ins.d_last is not None:
      p = [grid.load_row(ref.at[b, split, at]) for ref in ins.d_last]
    total = [grid.full_row(0.0)] * (len(decay) if gradients and is_constant else 0)
    if gradients:
      initial = [grid.load_row(ref.at[b, at]) for ref in ins.initial]

    def entering(first_token):
      """The state that entered the chunk in the forward pass."""
      neighbor = first_token + config.chunk if reverse else first_token - 1
      inside = neighbor < T if reverse else neighbor >= 0
      token = lax.min(lax.max(neighbor, 0), T - 1)
      return [
        jnp.where(inside, grid.load_row(ref.at[b, token, at]), y)
        for ref, y in zip(ins.out, initial, strict=True)
      ]

    def compute_chunk(first_token, streams_smem, is_first, results_smem, carry):
      p, total = carry
      is_padding = lambda t: None if end is None else first_token + t >= end
      h_entering = entering(first_token) if gradients else []
      sums = [grid.full_row(0.0) for _ in total]
      for group in _groups(config.chunk, not reverse):
        ds = {t: _load(streams_smem.d_out, t) for t in group}
        if is_constant:
          decays = {t: _padded(constant, 1.0, is_padding(t)) for t in group}
        else:
          decays = {t: _load(streams_smem.decay, t) for t in group}
        hs = {}
        if gradients:
          before = lambda t: t + 1 if reverse else t - 1
          hs = {
            t: _load(streams_smem.h, before(t)) if 0 <= before(t) < config.chunk else h_entering
            for t in group
          }
        results = {}
        for t in group:
          g = add(ds[t], p)
          p = backend.materialize(times(conjugate(decays[t]), g))
          if is_first is not None:
            p = boundaries.reset(is_first(t), p, _real(0.0, p))
          if gradients:
            h = hs[t]
            if is_first is not None:
              h = boundaries.reset(is_first(t), h, _real(0.0, h))
            if is_constant:
              h = _padded(h, 0.0, is_padding(t))
            d_decay = times(conjugate(h), g)[: len(decay)]
            results[t] = g, d_decay
            if is_constant:
              sums = [y + z for y, z in zip(sums, d_decay, strict=True)]
        for t, (g, d_decay) in results.items():
          _store(results_smem.d_x, t, g)
          _store(results_smem.d_decay, t, d_decay)
      if total:
        total = [y + z for y, z in zip(total, sums, strict=True)]
      return p, total

    p, total = grid.pipeline(
      compute_chunk,
      (p, total),
      config=config,
      streams_gmem=jax.tree.map(lambda ref: ref.at[b, :, at], ins.streams),
      first_gmem=None if ins.first is None else ins.first.at[b],
      results_smem=results_smem,
      results_gmem=_BackwardOutputs(
        tuple(ref.at[b, :, at] for ref in outs.d_x),
        () if is_constant else tuple(ref.at[b, :, at] for ref in outs.d_decay),
      ),
      start=split * split_length,
      num_chunks=split_length // config.chunk,
      reverse=not reverse,
      backend=backend,
    )
    for ref, y in zip(outs.d_initial, p, strict=True):
      grid.store_row_gmem(ref.at[b, split, at], y)
    for ref, y in zip(outs.d_decay, total, strict=False):  # none unless the decay is a constant
      grid.store_row_gmem(ref.at[b, split, at], y)

  words = boundaries.pack_bits(first, config.chunk)
  inputs = _BackwardInputs(streams, decay if is_constant else (), out, initial, d_last, words)
  smem = jax.tree.map(lambda dtype: grid.result_smem(config.chunk, dtype), dtypes)
  return grid.launch("diagonal_scan_backward", body, inputs, out_type, smem, (B, D, P), backend)


# Tokens and numbers


def _groups(chunk, reverse):
  """The tokens of a chunk in groups of `GROUP`, in the order of the scan."""
  order = list(range(chunk))[:: -1 if reverse else 1]
  return [order[n : n + GROUP] for n in range(0, chunk, GROUP)]


def _load(parts_smem, t):
  return [grid.load_row(ref.at[t]) for ref in parts_smem]


def _store(parts_smem, t, number):
  """Stores as many parts as there are buffers: of a real x only the real part has a gradient."""
  for ref, y in zip(parts_smem, number, strict=False):
    ref.at[t][...] = y.astype(ref.dtype)


def _real(value, like):
  """A real number in as many parts as `like`."""
  return [grid.full_row(value if n == 0 else 0.0) for n in range(len(like))]


def _padded(number, value, is_padding):
  """The real `value` at padding; `is_padding` None: there is none."""
  if is_padding is None:
    return number
  return boundaries.select(is_padding, _real(value, number), number)

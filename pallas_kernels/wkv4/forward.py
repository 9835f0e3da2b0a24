"""Forward kernel of WKV-4. One thread per channel."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.core import boundaries
from pallas_kernels.core import channel_grid as grid
from pallas_kernels.core.wgmma import Backend, with_int32_indices
from pallas_kernels.wkv4 import update
from pallas_kernels.wkv4.config import GROUP, STATE_ROWS
from pallas_kernels.wkv4.update import StateRows


class _Streams(NamedTuple):
  k: Any  # [T, 128]
  v: Any  # [T, 128]


class _KernelInputs(NamedTuple):
  streams: _Streams
  decay_rate: Any
  bonus: Any
  initial: Any
  first: Any


class ForwardResults(NamedTuple):
  """None where an array is not computed."""

  last: Any  # [B, P, D] float32, the state after each split
  out: Any  # [B, T, D] in the dtype of v
  chunk_states: Any  # [B, T / chunk, 3, D] float32, the state that enters each chunk


@with_int32_indices
def forward_kernel(
  k: jax.Array,  # [B, T, D]
  v: jax.Array,  # [B, T, D]
  decay_rate: jax.Array,  # [D] float32
  bonus: jax.Array,  # [D] float32
  initial: StateRows | None,  # [B, P, D] float32 each; None: empty
  first: jax.Array | None,  # [B, T]
  *,
  length: int,
  num_splits: int,
  config: grid.PipelineConfig,
  backend: Backend,
  outputs: bool = True,
  chunk_states: bool = False,
) -> ForwardResults:
  """Scans P independent splits; tokens from `length` on are padding and keep the state."""
  (B, T, D), C = k.shape, config.chunk
  P, split_length = num_splits, T // num_splits
  end = length if length < T else None
  out_type = ForwardResults(
    last=(jax.ShapeDtypeStruct((B, P, D), jnp.float32),) * 3,
    out=jax.ShapeDtypeStruct(v.shape, v.dtype) if outputs else None,
    chunk_states=(
      jax.ShapeDtypeStruct((B, T // C, STATE_ROWS, D), jnp.float32) if chunk_states else None
    ),
  )

  def body(ins, outs, out_smem):
    at, b, split = grid.coordinates(P)
    rate, bonus = (grid.load_row(ref.at[at]) for ref in (ins.decay_rate, ins.bonus))
    empty = update.State.empty()
    state = empty
    if ins.initial is not None:
      state = update.State.of_rows(*(grid.load_row(x.at[b, split, at]) for x in ins.initial))

    def compute_chunk(first_token, streams_smem, is_first, out_smem, state):
      if chunk_states:
        for n, row in enumerate(state.rows()):
          grid.store_row_gmem(outs.chunk_states.at[b, first_token // C, n, at], row)
      for group in range(0, C, GROUP):
        tokens = range(group, group + GROUP)
        rows = {t: _Streams(*(grid.load_row(x.at[t]) for x in streams_smem)) for t in tokens}
        results = {}
        for t in tokens:
          key, value = rows[t]
          state = boundaries.reset(is_first and is_first(t), state, empty)
          if outputs:
            past, present = update.read_weights(state, key, bonus, backend)
            total = past * state.denominator.high + present
            per_total = update.reciprocal(total, backend)
            results[t] = (past * state.numerator.high + present * value) * per_total
          after, _ = update.advance(state, key, value, rate, backend)
          is_padding = None if end is None else first_token + t >= end
          state = backend.materialize(boundaries.select(is_padding, state, after))
        for t, out in results.items():
          out_smem.at[t][...] = out.astype(out_smem.dtype)
      return state

    state = grid.pipeline(
      compute_chunk,
      state,
      config=config,
      streams_gmem=_Streams(*(ref.at[b, :, at] for ref in ins.streams)),
      first_gmem=None if ins.first is None else ins.first.at[b],
      results_smem=out_smem,
      results_gmem=outs.out.at[b, :, at] if outputs else None,
      start=split * split_length,
      num_chunks=split_length // C,
      reverse=False,
      skips=True,
      backend=backend,
    )
    for ref, row in zip(outs.last, state.rows(), strict=True):
      grid.store_row_gmem(ref.at[b, split, at], row)

  inputs = _KernelInputs(_Streams(k, v), decay_rate, bonus, initial, boundaries.pack_bits(first, C))
  smem = grid.result_smem(C, v.dtype) if outputs else None
  return grid.launch("wkv4_forward", body, inputs, out_type, smem, (B, D, P), backend)

"""Forward kernel of the scans with N states per channel.

It keeps the states in registers and streams tokens through SMEM in chunks:

  prologue   TMA copies bring the first chunks; the initial states are loaded
  mainloop   per chunk: store the states that enter it (for the backward pass); wait until the
             results of the chunk before the last have left SMEM; compute its tokens; start the copy
             of its results to GMEM
  epilogue   store the last states; wait for the last copies

All warps run the same program: there is no producer warpgroup, because a CTA is one warpgroup and
SMs are filled with CTAs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.channel_states.config import KernelConfig
from pallas_kernels.channel_states.recurrence import Recurrence
from pallas_kernels.channel_states.streams import (
  KernelInputs,
  Streams,
  in_cut,
  load_is_first,
  load_norm,
)
from pallas_kernels.channel_states.tiles import COMPILER_PARAMS, StateTiles
from pallas_kernels.core import boundaries
from pallas_kernels.core.wgmma import Backend, store_unoptimized, with_int32_indices


class ForwardResults(NamedTuple):
  """Results of the forward kernel."""

  out: Any  # [B, T, D]
  last: Any  # [B, D, N] float32
  chunk_states: Any  # [B, T / CHUNK, D, N], the states that enter the chunks; or None


@with_int32_indices
def forward_kernel(
  recurrence: Recurrence,
  inputs: KernelInputs,
  *,
  config: KernelConfig,
  out_dtype: Any,
  chunk_state_dtype: Any,
  has_boundaries: bool,
  backend: Backend,
) -> ForwardResults:
  """Runs the recurrence; with a `chunk_state_dtype` it stores the states that enter the chunks."""
  (B, T, D), N, C = inputs.streams.x.shape, inputs.initial.shape[2], config.chunk
  tiles = StateTiles(N, config.lanes, config.num_tiles)
  width = tiles.channels
  out_type = ForwardResults(
    out=jax.ShapeDtypeStruct((B, T, D), out_dtype),
    last=jax.ShapeDtypeStruct((B, D, N), jnp.float32),
    chunk_states=None
    if chunk_state_dtype is None
    else jax.ShapeDtypeStruct((B, T // C, D, N), chunk_state_dtype),
  )

  def body(ins, outs, out_smem):
    row, base = lax.axis_index("row"), lax.axis_index("cta") * width
    a_reg = [None] * tiles.number if ins.a is None else tiles.load(ins.a, base)
    skip_reg = tiles.load_channels(ins.skip, base)

    def compute_chunk(index, *args):
      (n,) = index
      *arrived, states = args
      arrived = iter(arrived)
      streams_smem = Streams(*(None if ref is None else next(arrived) for ref in ins.streams))
      slot = lax.rem(n, 2)
      if chunk_state_dtype is not None:
        for at, state in zip(tiles.slices(base), states, strict=True):
          store_unoptimized(outs.chunk_states.at[row, n, at], state.astype(chunk_state_dtype))
      backend.wait_copies(1)

      def compute_token(t, states, cut):
        keys = recurrence.load_keys(tiles, streams_smem, t)
        norm = load_norm(streams_smem, t)
        xs = tiles.load_channels(streams_smem.x.at[t])
        rates = tiles.load_channels(streams_smem.rate.at[t])
        is_first = load_is_first(streams_smem, t) if cut else None
        after = []
        for j, at in enumerate(tiles.slices()):
          gates = recurrence.gates(xs[j], rates[j], norm)
          decay = recurrence.decay(tiles, gates, a_reg[j], keys)
          state = boundaries.reset(is_first, states[j], 0.0)
          state = decay.update(state, tiles.broadcast_channels(gates.write) * keys.write)
          out = tiles.dot(state, keys.read) + skip_reg[j] * xs[j]
          out_smem.at[slot, t, at][...] = out.astype(out_dtype)
          after.append(state)
        return after

      def compute_tokens(states, *, cut):
        """The tokens of a chunk; `cut`: a document begins in it."""

        def compute_few(i, states):
          for k in range(config.unroll):
            states = compute_token(i * config.unroll + k, states, cut)
          return states

        return lax.fori_loop(0, C // config.unroll, compute_few, states)

      states = in_cut(compute_tokens, streams_smem, states, has_boundaries)
      # Also orders the loads above before the pipeline's next copies into the same slots.
      out_gmem = outs.out.at[row, pl.ds(n * C, C), pl.ds(base, width)]
      backend.start_copies([(out_smem.at[slot], out_gmem)])
      return states

    own = lambda ref: ref.at[row, :, pl.ds(base, width)]
    every = lambda ref: None if ref is None else ref.at[row]
    streams_gmem = Streams(
      own(ins.streams.x), own(ins.streams.rate), *(every(ref) for ref in ins.streams[2:])
    )
    by_channel = plgpu.BlockSpec((C, width), lambda n: (n, 0))
    by_state = plgpu.BlockSpec((C, N), lambda n: (n, 0))
    scalars = plgpu.BlockSpec((None, 2, C), lambda n: (n, 0, 0))
    specs = Streams(by_channel, by_channel, by_state, by_state, by_state, scalars)
    last = backend.pipeline(
      compute_chunk,
      grid=(T // C,),
      max_concurrent_steps=min(config.stages, T // C),
      init_carry=tiles.load(ins.initial.at[row], base),
      in_specs=[s for s, ref in zip(specs, streams_gmem, strict=True) if ref is not None],
    )(*(ref for ref in streams_gmem if ref is not None))
    for at, state in zip(tiles.slices(base), last, strict=True):
      store_unoptimized(outs.last.at[row, at], state)
    backend.wait_copies(wait_read_only=False)

  (results,) = plgpu.kernel(
    body,
    out_type=(out_type,),
    scratch_types=[plgpu.SMEM((2, C, width), out_dtype)],
    grid=(D // width, B),
    grid_names=("cta", "row"),
    interpret=backend.interpret,
    compiler_params=COMPILER_PARAMS,
    kernel_name=f"{recurrence.name}_forward",
  )(inputs)
  return results

"""Backward pass of the scans with N states per channel, in reverse chunk order.

Per chunk, the states are recomputed from those that enter it, which the forward pass stored, and
kept in SMEM; then the cotangents of the states pass it from its last token to its first, in
registers.

  prologue   TMA copies bring the last chunks; the cotangents of the last states are loaded
  mainloop   per chunk: recompute its states; wait until the results of the chunk before have left
             SMEM; per few tokens compute gradients, share the terms of the keys' gradients through
             SMEM, add them over the CTA's channels and store the sums; start the copy of the
             results to GMEM
  epilogue   store the sums over tokens and the cotangents of the initial states
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.channel_states.config import VECTOR, KernelConfig
from pallas_kernels.channel_states.recurrence import Recurrence
from pallas_kernels.channel_states.streams import Streams, in_cut, load_is_first, load_norm
from pallas_kernels.channel_states.tiles import COMPILER_PARAMS, StateTiles
from pallas_kernels.core import boundaries
from pallas_kernels.core.wgmma import Backend, store_unoptimized, with_int32_indices


class _KernelInputs(NamedTuple):
  streams: Streams
  skip: Any  # [D]
  a: Any  # [D, N] or None
  chunk_states: Any  # [B, T / chunk * D, N]: one column of tiles per CTA
  d_out: Any  # [B, T, D]
  d_last: Any  # [B, D, N]


class _Pipelined(NamedTuple):
  """Streams of the pipeline; None: does not exist or is loaded from GMEM."""

  x: Any
  rate: Any
  d_out: Any
  write_key: Any
  read_key: Any
  other_squares: Any
  scalars: Any
  chunk_states: Any


class _Scratch(NamedTuple):
  """SMEM of the backward kernel."""

  states: Any  # [chunk - 2, channels, N]: entry t is the state after token t
  sums: Any  # [tokens_per_sum * S, rows, N]: terms that are added over rows
  d_x: Any  # [chunk, channels]
  d_rate: Any  # [chunk, channels], or None: gradients of rates go to GMEM directly


class BackwardResults(NamedTuple):
  """Gradients."""

  x: Any  # [B, T, D]
  rate: Any  # [B, T, D], or of the logits of rates
  initial: Any  # [B, D, N] float32
  skip: Any  # [B, D] float32
  rate_sums: Any  # [B, D] float32, of `rate` over tokens where it is of logits; or None
  key_sums: Any  # [B, CTAs, T, S, N] float32, sums over the channels of a CTA
  a: Any  # [B, D, N] float32, or None


class _Carry(NamedTuple):
  """Registers, a list with one entry per tile each."""

  d_states: Any  # cotangents of the states after a token
  d_a: Any  # gradients of a so far, or None
  d_skip: Any  # gradients of skip so far
  d_bias: Any  # sums of the gradients of logits so far, or None


@with_int32_indices
def backward_kernel(
  recurrence: Recurrence,
  streams: Streams,
  skip: jax.Array,  # [D]
  a: jax.Array | None,  # [D, N]
  chunk_states: jax.Array,  # [B, T / chunk, D, N]
  d_out: jax.Array,  # [B, T, D]
  d_last: jax.Array,  # [B, D, N]
  *,
  logits_dtype: Any,
  config: KernelConfig,
  has_boundaries: bool,
  backend: Backend,
) -> BackwardResults:
  """Gradients of all inputs of the forward kernel, with a `logits_dtype` of the rates' logits."""
  x_dtype, rate_dtype, state_dtype = streams.x.dtype, streams.rate.dtype, chunk_states.dtype
  (B, T, D), N, C = streams.x.shape, chunk_states.shape[3], config.chunk
  num_chunks = T // C
  tiles = StateTiles(N, config.lanes, config.num_tiles)
  width, rows = tiles.channels, tiles.rows
  num_ctas = D // width
  S, together = recurrence.num_sums, config.tokens_per_sum
  sum_layout = _sum_layout(N)
  # Two CTAs share the SMEM of an SM. With wide rates some of what could pass through SMEM does not:
  # the states that enter the chunks and the gradients of the rates.
  bypass_smem = rate_dtype.itemsize > x_dtype.itemsize
  has_logits = logits_dtype is not None
  d_rate_dtype = logits_dtype if has_logits else rate_dtype
  out_type = BackwardResults(
    x=jax.ShapeDtypeStruct((B, T, D), x_dtype),
    rate=jax.ShapeDtypeStruct((B, T, D), d_rate_dtype),
    initial=jax.ShapeDtypeStruct((B, D, N), jnp.float32),
    skip=jax.ShapeDtypeStruct((B, D), jnp.float32),
    rate_sums=jax.ShapeDtypeStruct((B, D), jnp.float32) if has_logits else None,
    key_sums=jax.ShapeDtypeStruct((B, num_ctas, T * S, N), jnp.float32),
    a=None if a is None else jax.ShapeDtypeStruct((B, D, N), jnp.float32),
  )
  scratch = _Scratch(
    states=plgpu.SMEM((C - 2, width, N), state_dtype),
    sums=plgpu.SMEM((together * S, rows, N), jnp.float32),
    d_x=plgpu.SMEM((C, width), x_dtype),
    d_rate=None if bypass_smem else plgpu.SMEM((C, width), d_rate_dtype),
  )
  # The chunk that the pipeline brings m-th.
  chunk_at = lambda m: num_chunks - 1 - m
  by_channel = plgpu.BlockSpec((C, width), lambda m: (chunk_at(m), 0))
  by_state = plgpu.BlockSpec((C, N), lambda m: (chunk_at(m), 0))
  scalars = plgpu.BlockSpec((None, 2, C), lambda m: (chunk_at(m), 0, 0))

  def body(ins, outs, scratch):
    states_smem, sums_smem, d_x_smem, d_rate_smem = scratch
    row, cta = lax.axis_index("row"), lax.axis_index("cta")
    base = cta * width
    a_reg = [None] * tiles.number if ins.a is None else tiles.load(ins.a, base)
    skip_reg = tiles.load_channels(ins.skip, base)

    own = lambda ref: ref.at[row, :, pl.ds(base, width)]
    every = lambda ref: None if ref is None else ref.at[row]
    pipelined_gmem = _Pipelined(
      *(own(ref) for ref in (ins.streams.x, ins.streams.rate, ins.d_out)),
      *(every(ref) for ref in ins.streams[2:]),
      chunk_states=None if bypass_smem else every(ins.chunk_states),
    )
    specs = _Pipelined(
      *(by_channel,) * 3,
      *(by_state,) * 3,
      scalars=scalars,
      chunk_states=plgpu.BlockSpec((width, N), lambda m: (chunk_at(m) * num_ctas + cta, 0)),
    )

    def compute_chunk(index, *args):
      (m,) = index
      n = chunk_at(m)
      *arrived, carry = args
      arrived = iter(arrived)
      smem = _Pipelined(*(None if ref is None else next(arrived) for ref in pipelined_gmem))

      def load_entering():
        """The states that enter the chunk."""
        if bypass_smem:
          return tiles.load(ins.chunk_states.at[row], (n * num_ctas + cta) * width)
        return tiles.load(smem.chunk_states)

      def compute_tokens(carry, *, cut):
        """The tokens of a chunk; `cut`: a document begins in it."""

        def prepare(t):
          keys = recurrence.load_keys(tiles, smem, t)
          xs, rates = tiles.load_channels(smem.x.at[t]), tiles.load_channels(smem.rate.at[t])
          norm = load_norm(smem, t)
          gates = [recurrence.gates(x, rate, norm) for x, rate in zip(xs, rates, strict=True)]
          decays = [recurrence.decay(tiles, g, a, keys) for g, a in zip(gates, a_reg, strict=True)]
          is_first = load_is_first(smem, t) if cut else None
          return keys, xs, rates, gates, decays, is_first

        def recompute(t, states):
          """The states after token t."""
          keys, _, _, gates, decays, is_first = prepare(t)
          return [
            decay.update(
              boundaries.reset(is_first, state, 0.0),
              tiles.broadcast_channels(g.write) * keys.write,
            )
            for state, g, decay in zip(states, gates, decays, strict=True)
          ]

        def recompute_and_keep(t, states):
          states = recompute(t, states)
          for at, state in zip(tiles.slices(), states, strict=True):
            states_smem.at[t, at][...] = state.astype(state_dtype)
          return states

        # The state before token t is kept at t - 1, but for the first token, where it entered the
        # chunk, and the last, where it stays in registers.
        before_last = lax.fori_loop(0, C - 2, recompute_and_keep, load_entering())
        before_last = recompute(C - 2, before_last)
        last = recompute(C - 1, before_last)
        backend.wait_copies()

        def compute_token(t, carry, after, before, first_sum):
          """Passes token t backwards, between the states `before` and `after` it."""
          keys, xs, rates, gates, decays, is_first = prepare(t)
          d_outs = tiles.load_channels(smem.d_out.at[t])
          totals = []
          d_states, d_a, d_skip, d_bias = [], [], [], []
          for j, at in enumerate(tiles.slices()):
            d_out = tiles.broadcast_channels(d_outs[j])
            adjoint = carry.d_states[j] + d_out * keys.read
            along = tiles.dot(adjoint, keys.write)
            passed = decays[j].apply(adjoint)
            state = boundaries.reset(is_first, before[j], 0.0)
            own = recurrence.token_gradients(
              tiles, gates[j], a_reg[j], keys, xs[j], along, adjoint, passed, state
            )
            sums = [d_out * after[j], *own.sums]
            totals = [y + z for y, z in zip(totals, sums, strict=True)] if totals else sums
            d_x_smem.at[t, at][...] = (own.x + skip_reg[j] * d_outs[j]).astype(x_dtype)
            d_rate = own.rate * recurrence.slope(rates[j]) if has_logits else own.rate
            d_bias.append(carry.d_bias[j] + d_rate if has_logits else None)
            d_rate = d_rate.astype(d_rate_dtype)
            if bypass_smem:
              store_unoptimized(outs.rate.at[row, n * C + t, tiles.slices(base)[j]], d_rate)
            else:
              d_rate_smem.at[t, at][...] = d_rate
            d_states.append(boundaries.reset(is_first, passed, 0.0))
            d_a.append(None if own.a is None else carry.d_a[j] + own.a)
            d_skip.append(carry.d_skip[j] + d_outs[j] * xs[j])
          for number, total in enumerate(recurrence.key_sums(tiles, keys, totals), first_sum):
            sums_smem.at[number][...] = total
          return _Carry(d_states, d_a, d_skip, d_bias)

        def compute_few(i, carry, before_last=None, is_chunk_start=False):
          """Tokens whose sums over channels share a barrier, the last of the chunk for i = 0."""
          carry, after = carry
          t0 = C - together * (i + 1)
          for k in reversed(range(together)):
            if k == together - 1 and before_last is not None:
              before = before_last
            elif k == 0 and is_chunk_start:
              before = load_entering()
            else:
              before = tiles.load(states_smem.at[t0 + k - 1])
            carry = compute_token(t0 + k, carry, after, before, k * S)
            after = before
          backend.barrier()
          total = jnp.sum(plgpu.load(sums_smem, layout=sum_layout, optimized=False), axis=1)
          target = outs.key_sums.at[row, cta, pl.ds((n * C + t0) * S, together * S)]
          store_unoptimized(target, total)
          backend.barrier()
          return carry, after

        carry = compute_few(0, (carry, last), before_last=before_last)
        carry = lax.fori_loop(1, C // together - 1, compute_few, carry)
        carry, _ = compute_few(C // together - 1, carry, is_chunk_start=True)
        return carry

      carry = in_cut(compute_tokens, smem, carry, has_boundaries)
      # Also orders the loads above before the pipeline's next copies into the same slots.
      here = row, pl.ds(n * C, C), pl.ds(base, width)
      copies = [(d_x_smem, outs.x.at[here])]
      copies += [] if bypass_smem else [(d_rate_smem, outs.rate.at[here])]
      backend.start_copies(copies)
      return carry

    carry = _Carry(
      d_states=tiles.load(ins.d_last.at[row], base),
      d_a=[None if ins.a is None else tiles.zeros() for _ in range(tiles.number)],
      d_skip=[tiles.zero_channels() for _ in range(tiles.number)],
      d_bias=[tiles.zero_channels() if has_logits else None for _ in range(tiles.number)],
    )
    carry = backend.pipeline(
      compute_chunk,
      grid=(num_chunks,),
      max_concurrent_steps=min(config.stages, num_chunks),
      init_carry=carry,
      in_specs=[s for s, ref in zip(specs, pipelined_gmem, strict=True) if ref is not None],
    )(*(ref for ref in pipelined_gmem if ref is not None))
    for j, at in enumerate(tiles.slices(base)):
      store_unoptimized(outs.initial.at[row, at], carry.d_states[j])
      store_unoptimized(outs.skip.at[row, at], carry.d_skip[j])
      if has_logits:
        store_unoptimized(outs.rate_sums.at[row, at], carry.d_bias[j])
      if ins.a is not None:
        store_unoptimized(outs.a.at[row, at], carry.d_a[j])
    backend.wait_copies(wait_read_only=False)

  (results,) = plgpu.kernel(
    body,
    out_type=(out_type,),
    scratch_types=[scratch],
    grid=(num_ctas, B),
    grid_names=("cta", "row"),
    interpret=backend.interpret,
    compiler_params=COMPILER_PARAMS,
    kernel_name=f"{recurrence.name}_backward",
  )(_KernelInputs(streams, skip, a, chunk_states.reshape(B, num_chunks * D, N), d_out, d_last))
  return results._replace(key_sums=results.key_sums.reshape(B, num_ctas, T, S, N))


def _sum_layout(N):
  """Layout of [sums, rows, N] for sums over rows: a warp per sum, 4 states per thread."""
  lanes = N // VECTOR
  tiling = plgpu.Tiling(((4, 32 // lanes, N), (VECTOR,)))
  return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)

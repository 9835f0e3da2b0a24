"""Scans with N states per channel: entry point, `custom_vjp` and forward kernel.

The kernel keeps the states in registers and streams tokens through SMEM in chunks:

  prologue   TMA copies bring the first chunks; the initial states are loaded
  mainloop   per chunk: store the states that enter it (for the backward pass); wait until the
             results of the chunk before the last have left SMEM; compute its tokens; start the copy
             of its results to GMEM
  epilogue   store the last states; wait for the last copies

All warps run the same program: there is no producer warpgroup, because a CTA is one warpgroup and
SMs are filled with CTAs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import MADE_BY_KERNELS
from pallas_kernels.channel_states import config as tuning
from pallas_kernels.channel_states.backward import backward_kernel
from pallas_kernels.channel_states.config import KernelConfig
from pallas_kernels.channel_states.recurrence import Inputs, Recurrence
from pallas_kernels.channel_states.streams import Streams, load_is_first, load_norm
from pallas_kernels.channel_states.tiles import COMPILER_PARAMS, StateTiles
from pallas_kernels.core import boundaries
from pallas_kernels.core.gradients import custom_vjp
from pallas_kernels.core.wgmma import Backend, store_unoptimized, with_int32_indices


class Static(NamedTuple):
  """Arguments that the compiled program is specialized to."""

  recurrence: Recurrence
  out_dtype: Any
  interpret: Any = None
  logits_dtype: Any = None  # of `Inputs.rate_logits`; None without them


def scan(
  static: Static, inputs: Inputs, first: jax.Array | None, num_splits: int = 1
) -> tuple[jax.Array, jax.Array]:
  """Returns out [B, T, D] and the last state [B, D, N].

  A long sequence with few channels is split so that every SM has work: a first pass computes the
  state after each split that starts from zero, `Recurrence.split_decay` by how much a split decays
  a state, and from both follows the state that enters each split.

  Args:
    inputs: padded as `config` says; T is a multiple of CHUNK * num_splits.
    first: [B, T], set at the first tokens of documents; or None.
  """
  if num_splits == 1:
    return _scan(static, inputs, first)
  B, T, D = inputs.x.shape
  split = lambda x: x.reshape(B * num_splits, T // num_splits, *x.shape[2:])
  whole = lambda x: x.reshape(B, num_splits, *x.shape[1:])
  per_token = ("x", "rate", "write_key", "read_key", "other_squares", "key_norm", "rate_logits")
  pieces = {name: getattr(inputs, name) for name in per_token}
  pieces = inputs._replace(**{n: split(x) for n, x in pieces.items() if x is not None})
  first = None if first is None else split(first)
  # Derived from an array that is there: inside `shard_map` it must vary over the same mesh axes.
  empty = jnp.zeros_like(jnp.repeat(inputs.initial, num_splits, axis=0))
  alone = pieces._replace(initial=empty, skip=jnp.zeros_like(inputs.skip))
  run = lambda inputs: _scan(static, inputs, first)[1]
  added = whole(run(alone))
  decay = whole(static.recurrence.split_decay(alone, first, run))

  def enter(state, split):
    decay, added = split
    return decay * state + added, state

  by_split = lambda x: jnp.moveaxis(x, 1, 0)
  _, entering = jax.lax.scan(enter, inputs.initial, (by_split(decay), by_split(added)))
  entering = jnp.moveaxis(entering, 0, 1).reshape(empty.shape)
  out, last = _scan(static, pieces._replace(initial=entering), first)
  return out.reshape(B, T, D), whole(last)[:, -1]


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _scan(static, inputs, first):
  results = _forward(static, inputs, first, None)
  return results.out, results.last


def _forward(static, inputs, first, chunk_state_dtype):
  recurrence = static.recurrence
  inputs = recurrence.prepare(inputs)
  return forward_kernel(
    recurrence,
    KernelInputs(Streams.of(inputs, first), inputs.skip, inputs.a, inputs.initial),
    config=tuning.forward_config(recurrence.name, inputs.x.shape[2]),
    out_dtype=static.out_dtype,
    chunk_state_dtype=chunk_state_dtype,
    has_boundaries=first is not None,
    backend=Backend(static.interpret),
  )


def _forward_rule(static, inputs, first):
  results = _forward(static, inputs, first, inputs.x.dtype)
  results = jax.tree.map(functools.partial(checkpoint_name, name=MADE_BY_KERNELS), results)
  kept = inputs._replace(rate_logits=None, rate_bias=None)  # the slope follows from the rate
  return (results.out, results.last), (kept, first, results.chunk_states)


def _backward_rule(static, residuals, cotangents):
  inputs, first, chunk_states = residuals
  d_out, d_last = cotangents
  recurrence = static.recurrence
  prepared = recurrence.prepare(inputs)
  results = backward_kernel(
    recurrence,
    Streams.of(prepared, first),
    *(prepared.skip, prepared.a, chunk_states, d_out.astype(inputs.x.dtype), d_last),
    logits_dtype=static.logits_dtype,
    config=tuning.backward_config(chunk_states.shape[3], recurrence.num_sums),
    has_boundaries=first is not None,
    backend=Backend(static.interpret),
  )
  keys = recurrence.key_gradients(results.key_sums.sum(1), inputs)
  has_logits = static.logits_dtype is not None
  d_inputs = Inputs(
    results.x,
    None if has_logits else results.rate,
    keys.write_key,
    keys.read_key,
    results.skip.sum(0),
    results.initial,
    None if results.a is None else results.a.sum(0),
    keys.other_squares,
    keys.key_norm,
  )
  inputs = inputs._replace(rate=None) if has_logits else inputs
  d_inputs = jax.tree.map(lambda d, x: d.astype(x.dtype), d_inputs, inputs)
  if has_logits:
    d_inputs = d_inputs._replace(rate_logits=results.rate, rate_bias=results.rate_sums.sum(0))
  return d_inputs, None


_scan.defvjp(_forward_rule, _backward_rule)


class KernelInputs(NamedTuple):
  """Arrays of the forward kernel."""

  streams: Streams
  skip: Any  # [D]
  a: Any  # [D, N] or None
  initial: Any  # [B, D, N]


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
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)

      def compute_token(t, states):
        keys = recurrence.load_keys(tiles, streams_smem, t)
        norm = load_norm(streams_smem, t)
        xs = tiles.load_channels(streams_smem.x.at[t])
        rates = tiles.load_channels(streams_smem.rate.at[t])
        is_first = load_is_first(streams_smem, t) if has_boundaries else None
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

      def compute_tokens(i, states):
        for k in range(config.unroll):
          states = compute_token(i * config.unroll + k, states)
        return states

      states = lax.fori_loop(0, C // config.unroll, compute_tokens, states)
      # Also orders the loads above before the pipeline's next copies into the same slots.
      plgpu.commit_smem()
      out_gmem = outs.out.at[row, pl.ds(n * C, C), pl.ds(base, width)]
      plgpu.copy_smem_to_gmem(out_smem.at[slot], out_gmem)
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
    last = plgpu.emit_pipeline(
      compute_chunk,
      grid=(T // C,),
      max_concurrent_steps=min(config.stages, T // C),
      init_carry=tiles.load(ins.initial.at[row], base),
      in_specs=[s for s, ref in zip(specs, streams_gmem, strict=True) if ref is not None],
    )(*(ref for ref in streams_gmem if ref is not None))
    for at, state in zip(tiles.slices(base), last, strict=True):
      store_unoptimized(outs.last.at[row, at], state)
    plgpu.wait_smem_to_gmem(0)

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

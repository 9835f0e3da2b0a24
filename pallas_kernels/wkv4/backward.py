"""Backward pass of WKV-4, in reverse chunk order.

The states of a chunk are recomputed from the state that enters it, which the forward pass stored,
and stay in registers while the chunk is scanned backwards. With the mean z = numerator /
denominator, a_t = v_t - z_{t-1}, the weights f and b of numerator and token's value in the output,
d and e of state and value in the next state, and G the cotangent of the output:

    A_{t-1} = f G + d A_t                   C_{t-1} = -f b a G + d (C_t - A_t (z_t - z_{t-1}))
    dv = b G + e A_t                        dk = b f Z a G + e (C_t + A_t (v_t - z_t))

A is the cotangent of the numerator, C that of a shift of all values that the state holds.
lnssm_jax/ops/wkv4/README.md derives this.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.core import boundaries
from pallas_kernels.core import channel_grid as grid
from pallas_kernels.core.compensated_sum import CompensatedSum, fast_two_sum
from pallas_kernels.core.wgmma import Backend, with_int32_indices
from pallas_kernels.wkv4 import update


class _Residuals(NamedTuple):
  """Per-token residuals of the backward pass, recomputed per chunk."""

  past: jax.Array  # f, the weight of the numerator in the output
  present: jax.Array  # b, that of the token's value
  away: jax.Array  # a
  denominator: jax.Array  # of the state before
  factor: update.Factor  # d
  weight: jax.Array  # e
  share: jax.Array  # 1 / denominator of the state after; 1 if it is empty


class _Streams(NamedTuple):
  k: Any  # [T, 128]
  v: Any
  d_out: Any
  chunk_states: Any  # [T / chunk, 3, 128]


class _KernelInputs(NamedTuple):
  streams: _Streams
  decay_rate: Any
  bonus: Any
  d_last: Any
  first: Any


class _KeyValueGradients(NamedTuple):
  d_k: Any
  d_v: Any


class BackwardResults(NamedTuple):
  """None where an array is not computed."""

  d_initial: Any  # (A, C) [B, P, D] float32, of the state before each split
  d_k: Any  # [B, T, D] in the dtype of k
  d_v: Any  # [B, T, D] in the dtype of v
  d_rate: Any  # [B, P, D] float32, summed over each split
  d_bonus: Any  # [B, P, D] float32, summed over each split
  # (of A, of C) [B, P, D] float32: what A = 1 after the split becomes before it, were there no
  # outputs. C alone decays like A.
  passed: Any


@with_int32_indices
def backward_kernel(
  k: jax.Array,  # [B, T, D]
  v: jax.Array,  # [B, T, D]
  decay_rate: jax.Array,  # [D] float32
  bonus: jax.Array,  # [D] float32
  chunk_states: jax.Array,  # [B, T / chunk, 3, D] float32, of the forward pass
  d_out: jax.Array,  # [B, T, D]
  d_last: tuple[jax.Array, jax.Array] | None,  # (A, C) [B, P, D] float32, after each split
  first: jax.Array | None,  # [B, T]
  *,
  length: int,
  num_splits: int,
  config: grid.PipelineConfig,
  backend: Backend,
  outputs: bool = True,
) -> BackwardResults:
  """Scans P independent splits backwards; without `outputs` only `d_initial` and `passed`."""
  B, T, D = k.shape
  P, split_length = num_splits, T // num_splits
  end = length if length < T else None
  split_row = jax.ShapeDtypeStruct((B, P, D), jnp.float32)
  out_type = BackwardResults(
    d_initial=(split_row, split_row),
    d_k=jax.ShapeDtypeStruct((B, T, D), k.dtype) if outputs else None,
    d_v=jax.ShapeDtypeStruct((B, T, D), v.dtype) if outputs else None,
    d_rate=split_row if outputs else None,
    d_bonus=split_row if outputs else None,
    passed=None if outputs else (split_row, split_row),
  )

  def body(ins, outs, results_smem):
    at, b, split = grid.coordinates(P)
    rate, bonus = (grid.load_row(ref.at[at]) for ref in (ins.decay_rate, ins.bonus))
    zero, one = grid.full_row(0.0), grid.full_row(1.0)
    d_state = (zero, zero)
    if ins.d_last is not None:
      d_state = [grid.load_row(ref.at[b, split, at]) for ref in ins.d_last]
    A, C = (CompensatedSum(x, zero) for x in d_state)
    # With outputs the sums (d_rate, d_bonus), without them `passed`.
    extra = CompensatedSum(zero if outputs else one, zero), CompensatedSum(zero, zero)

    def recompute(state, streams_smem, is_padding, is_first):
      """The residuals of a chunk's tokens."""
      residuals = []
      z = update.mean(state, backend)
      for t in range(config.chunk):
        state, z = boundaries.reset(is_first(t), (state, z), (update.State.empty(), zero))
        key, value = grid.load_row(streams_smem.k.at[t]), grid.load_row(streams_smem.v.at[t])
        denominator = state.denominator.high
        past, present = update.read_weights(state, key, bonus, backend)
        per_total = update.reciprocal(past * denominator + present, backend)
        after, change = update.advance(state, key, value, rate, backend)
        there = after.denominator.high > 0.0
        safe = jnp.where(there, after.denominator.high, one)
        share = update.reciprocal(safe, backend)
        residual = _Residuals(
          past * per_total, present * per_total, value - z, denominator, *change, share
        )
        next_z = jnp.where(there, after.numerator.high * share, zero)
        state, z, residual = backend.materialize(
          (*boundaries.select(is_padding(t), (state, z), (after, next_z)), residual)
        )
        residuals.append(residual)
      return residuals

    def compute_chunk(first_token, streams_smem, is_first, results_smem, carry):
      is_padding = lambda t: None if end is None else first_token + t >= end
      starts_document = lambda t: is_first and is_first(t)
      rows = (grid.load_row(streams_smem.chunk_states.at[0, n]) for n in range(3))
      state = update.State.of_rows(*rows)
      residuals = recompute(state, streams_smem, is_padding, starts_document)
      A, C, extra_0, extra_1 = carry
      d_rates = d_bonuses = zero
      for t in reversed(range(config.chunk)):
        s, G = residuals[t], grid.load_row(streams_smem.d_out.at[t])
        decay = jnp.where(s.factor.near, one, zero) + s.factor.rest
        past_weight = decay * s.denominator
        move = s.weight * s.share * s.away  # z_t - z_{t-1}
        left = C.high - A.high * move
        read = s.past * s.present * s.away * G
        new_A = update.decayed_sum(s.factor, A, s.past * G)
        moved = _moved(s.factor, A.high, move)
        new_C = update.decayed_sum(s.factor, C, -read - moved)
        empty = CompensatedSum(zero, zero), CompensatedSum(zero, zero)
        if outputs:
          d_bonus = read * s.denominator
          stays = past_weight * s.share * s.away  # v_t - z_t
          d_k = d_bonus + s.weight * (C.high + A.high * stays)
          d_v = s.present * G + s.weight * A.high
          results_smem.d_k.at[t][...] = d_k.astype(k.dtype)
          results_smem.d_v.at[t][...] = d_v.astype(v.dtype)
          d_rate = past_weight * left
          d_bonus, d_rate = boundaries.select(is_padding(t), (zero, zero), (d_bonus, d_rate))
          d_rates, d_bonuses = d_rates - d_rate, d_bonuses + d_bonus
        else:
          passed = (
            update.decayed_sum(s.factor, extra_0, zero),
            update.decayed_sum(s.factor, extra_1, -_moved(s.factor, extra_0.high, move)),
          )
          passed = boundaries.reset(starts_document(t), passed, empty)
          extra_0, extra_1 = boundaries.select(is_padding(t), (extra_0, extra_1), passed)
        before = boundaries.reset(starts_document(t), (new_A, new_C), empty)
        A, C = backend.materialize(boundaries.select(is_padding(t), (A, C), before))
      if outputs:
        extra_0 = fast_two_sum(extra_0.high, d_rates + extra_0.low)
        extra_1 = fast_two_sum(extra_1.high, d_bonuses + extra_1.low)
      return A, C, extra_0, extra_1

    streams = ins.streams
    results_gmem = None
    if outputs:
      results_gmem = _KeyValueGradients(outs.d_k.at[b, :, at], outs.d_v.at[b, :, at])
    A, C, *extra = grid.pipeline(
      compute_chunk,
      (A, C, *extra),
      config=config,
      streams_gmem=_Streams(
        *(ref.at[b, :, at] for ref in (streams.k, streams.v, streams.d_out)),
        chunk_states=streams.chunk_states.at[b, :, :, at],
      ),
      first_gmem=None if ins.first is None else ins.first.at[b],
      results_smem=results_smem,
      results_gmem=results_gmem,
      start=split * split_length,
      num_chunks=split_length // config.chunk,
      reverse=True,
      skips=True,
      backend=backend,
    )
    extra_gmem = (outs.d_rate, outs.d_bonus) if outputs else outs.passed
    for ref, x in zip((*outs.d_initial, *extra_gmem), (A, C, *extra), strict=True):
      grid.store_row_gmem(ref.at[b, split, at], x.high)

  smem = None
  if outputs:
    smem = _KeyValueGradients(*(grid.result_smem(config.chunk, x.dtype) for x in (k, v)))
  words = boundaries.pack_bits(first, config.chunk)
  inputs = _KernelInputs(_Streams(k, v, d_out, chunk_states), decay_rate, bonus, d_last, words)
  return grid.launch("wkv4_backward", body, inputs, out_type, smem, (B, D, P), backend)


def _moved(factor, A, move):
  """d A (z_t - z_{t-1})."""
  return (factor.near_part(A) + factor.rest * A) * move

"""The way back through RWKV-4's scan, chunk by chunk from the end.

A chunk's states are computed again from the one that enters it, which the forward pass kept, and
stay in registers while the chunk is walked backwards. With the mean z = numerator / denominator,
a_t = v_t - z_{t-1}, the weights f and b of numerator and present value in the output, and d, e of
state and value in the next state:

    A_{t-1} = f G + d A_t                   C_{t-1} = -f b a G + d (C_t - A_t (z_t - z_{t-1}))
    dv = b G + e A_t                        dk = b f Z a G + e (C_t + A_t (v_t - z_t))

A is the adjoint of the numerator, C that of a shift of all values that the state holds.
lnssm_jax/ops/wkv4/README.md derives this.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import channels
from pallas_kernels.channels import CHANNELS
from pallas_kernels.tensor_core import in_32_bits
from pallas_kernels.wkv4 import step
from pallas_kernels.wkv4.scan import PARAMS, ROWS, place


class _Step(NamedTuple):
  """What the way back needs of a step."""

  past: jax.Array  # f, the weight of the numerator in the output
  present: jax.Array  # b, that of the present value
  away: jax.Array  # a
  denominator: jax.Array  # of the state before
  factor: step.Factor  # d
  weight: jax.Array  # e
  share: jax.Array  # 1 / denominator of the state after; 1 if it is empty


class _Sum(NamedTuple):
  """A sum, and what its last rounding lost."""

  high: jax.Array
  low: jax.Array


@in_32_bits
def adjoint(
  k,  # [B, T, D]
  v,  # [B, T, D]
  decay_rate,  # [D] float32
  bonus,  # [D] float32
  borders,  # [B, T / ROWS, 3, D] float32, of `scan`
  d_out,  # [B, T, D]
  arriving,  # (A, C), [B, P, D] float32 each: what the steps behind each part send back; or None
  forget,  # [B, T] int32 or None
  *,
  length,
  number_of_parts=1,
  outputs=True,
  interpret=None,
):
  """Runs the way back in P independent parts of the sequence.

  Returns a dictionary: "arriving" (A, C) [B, P, D] float32, what each part sends to the state
  before it; with `outputs` "k" and "v" [B, T, D] in their dtypes and "rate" and "bonus" [B, P, D]
  float32, summed over each part; without them "through" [B, P, D] float32 twice, what A = 1 behind
  the part becomes, of A and of C, were there no outputs. (C alone decays like A.)
  """
  B, T, D = k.shape
  P, L = number_of_parts, T // number_of_parts
  end = length if length < T else None
  itemsize = lambda x: jnp.dtype(x.dtype).itemsize
  of_a_part = jax.ShapeDtypeStruct((B, P, D), jnp.float32)
  out_type: dict = {"arriving": (of_a_part, of_a_part)}
  written = {}
  if outputs:
    written = {"k": k.dtype, "v": v.dtype}
    out_type |= {name: jax.ShapeDtypeStruct((B, T, D), dtype) for name, dtype in written.items()}
    out_type |= {"rate": of_a_part, "bonus": of_a_part}
  else:
    out_type["through"] = (of_a_part, of_a_part)
  stages = channels.stages(
    ROWS,
    read=itemsize(k) + itemsize(v) + itemsize(d_out) + 12 / ROWS,
    written=sum(jnp.dtype(dtype).itemsize for dtype in written.values()),
  )

  def body(ins, outs, buffers):
    k, v, rate, bonus, borders, d_out, arriving, forget = ins
    here, b, part = place(P)
    rate, bonus = (channels.row_anywhere(ref.at[here]) for ref in (rate, bonus))
    zero, one = channels.full(0.0), channels.full(1.0)
    start = (zero, zero)
    if arriving is not None:
      start = [channels.row_anywhere(ref.at[b, part, here]) for ref in arriving]
    start = [_Sum(x, zero) for x in start]
    extra = [_Sum(zero if outputs else one, zero), _Sum(zero, zero)]

    def chunk(first, refs, flag, buffers, carry):
      state = step.state_of(*(channels.row(refs["borders"].at[0, n]) for n in range(3)))
      row = lambda name, t: channels.row(refs[name].at[t])
      padding = lambda t: None if end is None else first + t >= end
      steps = []
      z = step.mean(state, interpret)
      for t in range(ROWS):
        forgets = flag and flag(t)
        state, z = step.unless(forgets, (state, z), (step.empty_state(), zero))
        key, value = row("k", t), row("v", t)
        past, present = step.read_weights(state, key, bonus, interpret)
        per_total = step.reciprocal(past * state.denominator + present, interpret)
        following, change = step.advance(state, key, value, rate, interpret)
        there = following.denominator > 0.0
        share = step.reciprocal(jnp.where(there, following.denominator, one), interpret)
        made = _Step(
          past * per_total, present * per_total, value - z, state.denominator, *change, share
        )
        next_z = jnp.where(there, following.numerator * share, zero)
        state, z, made = channels.computed(
          (*step.unless(padding(t), (following, next_z), (state, z)), made), interpret
        )
        steps.append(made)

      A, C, first_extra, second_extra = carry
      rates = bonuses = zero
      for t in reversed(range(ROWS)):
        s, G = steps[t], row("d", t)
        decay = jnp.where(s.factor.near, one, zero) + s.factor.rest
        past_weight = decay * s.denominator
        move = s.weight * s.share * s.away  # z_t - z_{t-1}
        left = C.high - A.high * move
        read = s.past * s.present * s.away * G
        new_A = _Sum(*step.decayed_sum(s.factor, A.high, A.low, s.past * G))
        moved = _moved(s.factor, A.high, move)
        new_C = _Sum(*step.decayed_sum(s.factor, C.high, C.low, -read - moved))
        if outputs:
          own = read * s.denominator
          stays = past_weight * s.share * s.away  # v_t - z_t
          results = {
            "k": own + s.weight * (C.high + A.high * stays),
            "v": s.present * G + s.weight * A.high,
          }
          for name, x in results.items():
            buffers[name].at[t][...] = x.astype(buffers[name].dtype)
          forgotten = past_weight * left
          own, forgotten = step.unless(padding(t), (own, forgotten), (zero, zero))
          rates, bonuses = rates - forgotten, bonuses + own
        else:
          through, shifted = first_extra, second_extra
          moved = _moved(s.factor, through.high, move)
          new_extra = (
            _Sum(*step.decayed_sum(s.factor, through.high, through.low, zero)),
            _Sum(*step.decayed_sum(s.factor, shifted.high, shifted.low, -moved)),
          )
          new_extra = step.unless(flag and flag(t), new_extra, (_Sum(zero, zero),) * 2)
          first_extra, second_extra = step.unless(padding(t), new_extra, (through, shifted))
        cut = step.unless(flag and flag(t), (new_A, new_C), (_Sum(zero, zero),) * 2)
        A, C = channels.computed(step.unless(padding(t), cut, (A, C)), interpret)
      if outputs:
        first_extra = _Sum(*step.exact_sum(first_extra.high, rates + first_extra.low))
        second_extra = _Sum(*step.exact_sum(second_extra.high, bonuses + second_extra.low))
      return A, C, first_extra, second_extra

    A, C, *extra = channels.walk(
      chunk,
      (*start, *extra),
      steps={
        "k": k.at[b, :, here],
        "v": v.at[b, :, here],
        "d": d_out.at[b, :, here],
        "borders": borders.at[b, :, :, here],
      },
      flags=None if forget is None else forget.at[b],
      results={name: (memory, outs[name].at[b, :, here]) for name, memory in buffers.items()},
      start=part * L,
      count=L // ROWS,
      rows=ROWS,
      stages=stages,
      backwards=True,
    )
    targets = [*outs["arriving"]]
    targets += [outs["rate"], outs["bonus"]] if outputs else outs["through"]
    for ref, x in zip(targets, (A, C, *extra), strict=True):
      channels.put_anywhere(ref.at[b, part, here], x.high)

  return plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=[{name: channels.buffer(ROWS, dtype) for name, dtype in written.items()}],
    grid=(D // CHANNELS, B * P),
    grid_names=("channels", "row"),
    interpret=interpret,
    compiler_params=PARAMS,
  )((k, v, decay_rate, bonus, borders, d_out, arriving, forget))


def _moved(factor, A, move):
  """d A (z_t - z_{t-1})."""
  return (jnp.where(factor.near, A, channels.full(0.0)) + factor.rest * A) * move

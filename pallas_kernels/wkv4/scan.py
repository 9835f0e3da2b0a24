"""RWKV-4's scan: one pass over keys and values, a thread for each channel.

    N_t = e^{-w} N_{t-1} + e^{k_t} v_t          Z_t = e^{-w} Z_{t-1} + e^{k_t}
    y_t = (N_{t-1} + e^{u+k_t} v_t) / (Z_{t-1} + e^{u+k_t})

The state is (max, N / e^max, Z / e^max), with max the running maximum of the decayed keys.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import channels
from pallas_kernels.channels import CHANNELS
from pallas_kernels.tensor_core import in_32_bits
from pallas_kernels.wkv4 import step

PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
ROWS = 16  # steps in a chunk: as many as the backward pass holds in registers
_GROUP = 8  # steps whose rows are read together, before any of their results is written


def place(number_of_parts):
  """(this block's channels, its sequence, its part)."""
  row = lax.axis_index("row")
  here = pl.ds(lax.axis_index("channels") * CHANNELS, CHANNELS)
  return here, row // number_of_parts, lax.rem(row, number_of_parts)


@in_32_bits
def scan(
  k,  # [B, T, D]
  v,  # [B, T, D]
  decay_rate,  # [D] float32
  bonus,  # [D] float32
  initial,  # (max, numerator, denominator), [B, P, D] float32 each; or None: empty
  forget,  # [B, T] int32, set at the steps that forget the state, or None
  *,
  length,
  number_of_parts=1,
  outputs=True,
  borders=False,
  interpret=None,
):
  """Runs the scan in P independent parts of the sequence.

  T is a multiple of `channels.padded_length`, D of `channels.CHANNELS`. Steps from `length` on are
  padding, which leaves the state as it is.

  Returns a dictionary: "last" (max, numerator, denominator) [B, P, D] float32; with `outputs` "out"
  [B, T, D] in the dtype of v; with `borders` "borders" [B, T / ROWS, 3, D] float32, the states that
  enter the chunks.
  """
  B, T, D = k.shape
  P, L = number_of_parts, T // number_of_parts
  end = length if length < T else None
  itemsize = lambda x: jnp.dtype(x.dtype).itemsize
  read, written = itemsize(k) + itemsize(v), itemsize(v) if outputs else 0
  stages = channels.stages(ROWS, read=read, written=written)
  out_type: dict = {"last": (jax.ShapeDtypeStruct((B, P, D), jnp.float32),) * 3}
  if outputs:
    out_type["out"] = jax.ShapeDtypeStruct(v.shape, v.dtype)
  if borders:
    out_type["borders"] = jax.ShapeDtypeStruct((B, T // ROWS, 3, D), jnp.float32)

  def body(ins, outs, *buffers):
    k, v, rate, bonus, initial, forget = ins
    here, b, part = place(P)
    rate, bonus = (channels.row_anywhere(ref.at[here]) for ref in (rate, bonus))
    nothing = step.empty_state()
    start = nothing
    if initial is not None:
      start = step.state_of(*(channels.row_anywhere(ref.at[b, part, here]) for ref in initial))

    def chunk(first, refs, flag, buffers, state):
      if borders:
        for n in range(3):
          channels.put_anywhere(outs["borders"].at[b, first // ROWS, n, here], state[n])
      for group in range(0, ROWS, _GROUP):
        steps = range(group, group + _GROUP)
        rows = {t: (channels.row(refs["k"].at[t]), channels.row(refs["v"].at[t])) for t in steps}
        results = {}
        for t in steps:
          key, value = rows[t]
          state = step.unless(flag and flag(t), state, nothing)
          if outputs:
            past, present = step.read_weights(state, key, bonus, interpret)
            total = past * state.denominator + present
            per_total = step.reciprocal(total, interpret)
            results[t] = (past * state.numerator + present * value) * per_total
          following, _ = step.advance(state, key, value, rate, interpret)
          padding = None if end is None else first + t >= end
          state = channels.computed(step.unless(padding, following, state), interpret)
        for t, out in results.items():
          buffers["out"].at[t][...] = out.astype(buffers["out"].dtype)
      return state

    state = channels.walk(
      chunk,
      start,
      steps={"k": k.at[b, :, here], "v": v.at[b, :, here]},
      flags=None if forget is None else forget.at[b],
      results={"out": (buffers[0], outs["out"].at[b, :, here])} if outputs else {},
      start=part * L,
      count=L // ROWS,
      rows=ROWS,
      stages=stages,
      backwards=False,
    )
    for ref, x in zip(outs["last"], state[:3], strict=True):
      channels.put_anywhere(ref.at[b, part, here], x)

  return plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=[channels.buffer(ROWS, v.dtype)] if outputs else [],
    grid=(D // CHANNELS, B * P),
    grid_names=("channels", "row"),
    interpret=interpret,
    compiler_params=PARAMS,
  )((k, v, decay_rate, bonus, initial, forget))

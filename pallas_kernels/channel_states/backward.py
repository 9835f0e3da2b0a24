"""The walk back: states of a chunk made again, then their adjoints, in registers."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.channel_states.tiles import COMPILER_PARAMS, VECTOR, Tiles, barrier
from pallas_kernels.tensor_core import in_32_bits, store_anywhere


@in_32_bits
def gradients(cell, inputs, *, tiles, chunk, together=None, stages=2, resets=False, interpret=None):
  """Gradients from `inputs` of the forward pass, "borders", "d_out" and "d_last".

  Returns a dictionary: "x", "rate" [B, T, D]; "initial" [B, D, N] float32; "skip" [B, D] float32;
  "sums" [B, D/channels, T, S, N] float32, what `cell` sums over the channels of a block; and the
  gradients of the cell's parameters, [B, D, N] float32.
  """
  x, borders = inputs["x"], inputs["borders"]
  B, T, D = x.shape
  N, C = borders.shape[2], chunk
  M = T // C
  form = Tiles(N, *tiles)
  wide, rows = form.channels, form.rows
  S, together = len(cell.sums), together or cell.together
  by_step = _sum_layout(N)
  # Two blocks share the memory of a multiprocessor. With wide rates some of what could pass through
  # shared memory goes directly: the borders in and the gradients of the rates out.
  directly = inputs["rate"].dtype.itemsize > x.dtype.itemsize
  out_type = {
    "x": jax.ShapeDtypeStruct((B, T, D), x.dtype),
    "rate": jax.ShapeDtypeStruct((B, T, D), inputs["rate"].dtype),
    "initial": jax.ShapeDtypeStruct((B, D, N), jnp.float32),
    "skip": jax.ShapeDtypeStruct((B, D), jnp.float32),
    "sums": jax.ShapeDtypeStruct((B, D // wide, T * S, N), jnp.float32),
  }
  for name in cell.parameters:
    out_type[name] = jax.ShapeDtypeStruct((B, D, N), jnp.float32)
  scratch = {
    "history": plgpu.SMEM((C - 2, wide, N), borders.dtype),
    "sums": plgpu.SMEM((together * S, rows, N), jnp.float32),
    "x": plgpu.SMEM((C, wide), x.dtype),
  }
  if not directly:
    scratch["rate"] = plgpu.SMEM((C, wide), inputs["rate"].dtype)
  by_channel = "x", "rate", "d_out"
  streams = [n for n in (*by_channel, *cell.keys, "scalars") if n in inputs]
  if not directly:
    streams.append("borders")

  def spec(name, block):
    """The block of a pipeline that goes back in time."""
    if name == "borders":
      return plgpu.BlockSpec((wide, N), lambda m: ((M - 1 - m) * (D // wide) + block, 0))
    if name == "scalars":
      return plgpu.BlockSpec((None, 2, C), lambda m: (M - 1 - m, 0, 0))
    width = wide if name in by_channel else N
    return plgpu.BlockSpec((C, width), lambda m: (M - 1 - m, 0))

  def body(ins, outs, s):
    row, block = lax.axis_index("row"), lax.axis_index("block")
    base = block * wide
    parameters = cell.tiles(form, ins, base)
    skip = form.vectors(ins["skip"], base)

    def chunk_step(index, *args):
      (m,) = index
      n = M - 1 - m
      *blocks, carry = args
      refs = dict(zip(streams, blocks, strict=True))

      def border():
        if directly:
          return form.load(ins["borders"].at[row], (n * (D // wide) + block) * wide)
        return form.load(refs["borders"])

      def prepared(t):
        keys = cell.load_keys(form, refs, t)
        xs, rates = form.vectors(refs["x"].at[t]), form.vectors(refs["rate"].at[t])
        scalars = cell.scalars(refs, t)
        gates = [cell.gates(*pair, scalars) for pair in zip(xs, rates, strict=True)]
        decays = [cell.decay(form, g, p, keys) for g, p in zip(gates, parameters, strict=True)]
        first = refs["scalars"][0, t] > 0 if resets else None
        return keys, xs, gates, decays, first

      def entering(first, state):
        return state if first is None else jnp.where(first, 0.0, state)

      def again(t, states):
        keys, _, gates, decays, first = prepared(t)
        return [
          cell.after(decay, entering(first, state), form.across(g.write) * keys[cell.keys[0]])
          for state, g, decay in zip(states, gates, decays, strict=True)
        ]

      def keep(t, states):
        states = again(t, states)
        for place, state in zip(form.places(), states, strict=True):
          s["history"].at[t, place][...] = state.astype(borders.dtype)
        return states

      # What enters step t lies at t - 1, but for the first step, which the border enters, and the
      # last, which registers hold.
      entered = lax.fori_loop(0, C - 2, keep, border())
      entered = again(C - 2, entered)
      states = again(C - 1, entered)
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)

      def back(t, carry, before, sums_at):
        adjoints, after, d_parameters, d_skip = carry
        keys, xs, gates, decays, first = prepared(t)
        d_outs = form.vectors(refs["d_out"].at[t])
        totals = None
        new = [], [], []
        for j, place in enumerate(form.places()):
          d_out = form.across(d_outs[j])
          adjoint = adjoints[j] + d_out * keys[cell.keys[1]]
          along = form.sum_of(adjoint, keys[cell.keys[0]])
          passed = cell.decayed(decays[j], adjoint)
          state = entering(first, before[j])
          d_x, d_rate, sums, d_parameter = cell.back(
            form, gates[j], parameters[j], keys, xs[j], along, adjoint, passed, state
          )
          sums = [d_out * after[j], *sums]
          totals = sums if totals is None else [a + b for a, b in zip(totals, sums, strict=True)]
          s["x"].at[t, place][...] = (d_x + skip[j] * d_outs[j]).astype(x.dtype)
          d_rate = d_rate.astype(inputs["rate"].dtype)
          if directly:
            store_anywhere(outs["rate"].at[row, n * C + t, form.places(base)[j]], d_rate)
          else:
            s["rate"].at[t, place][...] = d_rate
          new[0].append(entering(first, passed))
          new[1].append([a + b for a, b in zip(d_parameters[j], d_parameter, strict=True)])
          new[2].append(d_skip[j] + d_outs[j] * xs[j])
        for number, total in enumerate(cell.totals(form, keys, totals), sums_at):
          s["sums"].at[number][...] = total
        return new[0], before, new[1], new[2]

      def several(i, carry, entered=None, at_border=False):
        t0 = C - together * (i + 1)
        for k in reversed(range(together)):
          if k == together - 1 and entered is not None:
            before = entered
          elif k == 0 and at_border:
            before = border()
          else:
            before = form.load(s["history"].at[t0 + k - 1])
          carry = back(t0 + k, carry, before, k * S)
        barrier()
        total = jnp.sum(plgpu.load(s["sums"], layout=by_step, optimized=False), axis=1)
        target = outs["sums"].at[row, block, pl.ds((n * C + t0) * S, together * S)]
        store_anywhere(target, total)
        barrier()
        return carry

      adjoints, d_parameters, d_skip = carry
      carry = several(0, (adjoints, states, d_parameters, d_skip), entered=entered)
      carry = lax.fori_loop(1, C // together - 1, several, carry)
      carry = several(C // together - 1, carry, at_border=True)
      adjoints, _, d_parameters, d_skip = carry
      # Also orders the reads above before the pipeline's next copies into the same buffers.
      plgpu.commit_smem()
      for name in ("x",) if directly else ("x", "rate"):
        target = outs[name].at[row, pl.ds(n * C, C), pl.ds(base, wide)]
        plgpu.copy_smem_to_gmem(s[name], target)
      return adjoints, d_parameters, d_skip

    init = (
      form.load(ins["d_last"].at[row], base),
      [[form.zeros() for _ in cell.parameters] for _ in range(form.number)],
      [form.no_channels() for _ in range(form.number)],
    )
    slices = [
      ins[n].at[row, :, pl.ds(base, wide)] if n in by_channel else ins[n].at[row] for n in streams
    ]
    adjoints, d_parameters, d_skip = plgpu.emit_pipeline(
      chunk_step,
      grid=(M,),
      max_concurrent_steps=min(stages, M),
      init_carry=init,
      in_specs=[spec(name, block) for name in streams],
    )(*slices)
    for j, place in enumerate(form.places(base)):
      store_anywhere(outs["initial"].at[row, place], adjoints[j])
      store_anywhere(outs["skip"].at[row, place], d_skip[j])
      for name, value in zip(cell.parameters, d_parameters[j], strict=True):
        store_anywhere(outs[name].at[row, place], value)
    plgpu.wait_smem_to_gmem(0)

  results = plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=[scratch],
    grid=(D // wide, B),
    grid_names=("block", "row"),
    interpret=interpret,
    compiler_params=COMPILER_PARAMS,
    kernel_name=f"{cell.name}_gradients",
  )(inputs)
  results["sums"] = results["sums"].reshape(B, D // wide, T, S, N)
  return results


def _sum_layout(N):
  """How threads share [sums, rows, N] to add over rows: a warp to a sum, 4 states to a thread."""
  lanes = N // VECTOR
  tiling = plgpu.Tiling(((4, 32 // lanes, N), (VECTOR,)))
  return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)

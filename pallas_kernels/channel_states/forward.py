"""The walk along the steps with the states in registers."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.channel_states.tiles import COMPILER_PARAMS, Tiles
from pallas_kernels.tensor_core import in_32_bits, store_anywhere


@in_32_bits
def outputs(
  cell,
  inputs,
  *,
  out_dtype=None,
  border_dtype=None,
  tiles,
  chunk,
  unroll=2,
  stages=2,
  resets=False,
  interpret=None,
):
  """Runs the recurrence of `cell`.

  Returns a dictionary: "out" [B, T, D] in `out_dtype` (that of x), "last" [B, D, N] float32 and,
  with `border_dtype`, "borders" [B, T/C, D, N], the states that enter the chunks.
  """
  x = inputs["x"]
  out_dtype = out_dtype or x.dtype
  B, T, D = x.shape
  N, C = inputs["initial"].shape[2], chunk
  form = Tiles(N, *tiles)
  wide = form.channels
  out_type = {
    "out": jax.ShapeDtypeStruct((B, T, D), out_dtype),
    "last": jax.ShapeDtypeStruct((B, D, N), jnp.float32),
  }
  if border_dtype is not None:
    out_type["borders"] = jax.ShapeDtypeStruct((B, T // C, D, N), border_dtype)
  streams = [n for n in ("x", "rate", *cell.keys, "scalars") if n in inputs]

  def body(ins, outs, s):
    row, base = lax.axis_index("row"), lax.axis_index("block") * wide
    parameters = cell.tiles(form, ins, base)
    skip = form.vectors(ins["skip"], base)

    def chunk_step(index, *args):
      (n,) = index
      *blocks, states = args
      refs = dict(zip(streams, blocks, strict=True))
      slot = lax.rem(n, 2)
      if border_dtype is not None:
        for place, state in zip(form.places(base), states, strict=True):
          store_anywhere(outs["borders"].at[row, n, place], state.astype(border_dtype))
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)

      def step(t, states):
        keys = cell.load_keys(form, refs, t)
        scalars = cell.scalars(refs, t)
        xs, rates = form.vectors(refs["x"].at[t]), form.vectors(refs["rate"].at[t])
        first = refs["scalars"][0, t] > 0 if resets else None
        new = []
        for j, place in enumerate(form.places()):
          gates = cell.gates(xs[j], rates[j], scalars)
          decay = cell.decay(form, gates, parameters[j], keys)
          state = states[j] if first is None else jnp.where(first, 0.0, states[j])
          state = cell.after(decay, state, form.across(gates.write) * keys[cell.keys[0]])
          out = form.sum_of(state, keys[cell.keys[1]]) + skip[j] * xs[j]
          s["out"].at[slot, t, place][...] = out.astype(out_dtype)
          new.append(state)
        return new

      def steps(i, states):
        for k in range(unroll):
          states = step(i * unroll + k, states)
        return states

      states = lax.fori_loop(0, C // unroll, steps, states)
      # Also orders the reads above before the pipeline's next copies into the same buffers.
      plgpu.commit_smem()
      target = outs["out"].at[row, pl.ds(n * C, C), pl.ds(base, wide)]
      plgpu.copy_smem_to_gmem(s["out"].at[slot], target)
      return states

    last = plgpu.emit_pipeline(
      chunk_step,
      grid=(T // C,),
      max_concurrent_steps=min(stages, T // C),
      init_carry=form.load(ins["initial"].at[row], base),
      in_specs=[_spec(n, inputs[n], C, wide if n in ("x", "rate") else None) for n in streams],
    )(*[_slice(ins[n].at[row], base, wide if n in ("x", "rate") else None) for n in streams])
    for place, state in zip(form.places(base), last, strict=True):
      store_anywhere(outs["last"].at[row, place], state)
    plgpu.wait_smem_to_gmem(0)

  return plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=[{"out": plgpu.SMEM((2, C, wide), out_dtype)}],
    grid=(D // wide, B),
    grid_names=("block", "row"),
    interpret=interpret,
    compiler_params=COMPILER_PARAMS,
    kernel_name=f"{cell.name}_outputs",
  )(inputs)


def _spec(name, array, C, channels):
  """The block of a pipeline: a chunk of an array [B, T, D] or [B, T, N], or its scalars."""
  if name == "scalars":
    return plgpu.BlockSpec((None, 2, C), lambda n: (n, 0, 0))
  return plgpu.BlockSpec((C, channels or array.shape[2]), lambda n: (n, 0))


def _slice(ref, base, channels):
  return ref if channels is None else ref.at[:, pl.ds(base, channels)]

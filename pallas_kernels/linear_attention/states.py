"""The state at every border between chunks, in order of time or against it.

    S_{n+1} = diag(decay_n) S_n + sum over the steps j of chunk n of  a_j w_j b_j^T

Forward: a = keys, b = values, w = what is left of step j at the chunk's end. Backward, for the
adjoint of the state: chunks in reverse, a = queries, b = the output's cotangent, w = what is left
of the chunk's start at step i.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tensor_core import (
  CHUNK,
  COMPILER_PARAMS,
  across,
  in_32_bits,
  load,
  multiply,
  rows_of,
  tile,
  tile_spec,
  turned,
  zeros,
)


@in_32_bits
def chunk_states(
  a,  # [B, T, H, K] bfloat16, T a multiple of the chunk
  b,  # [B, T, H, V] bfloat16
  weight,  # [B|1, H, T|C] float32, or None for 1
  decay,  # [B|1, H, N|1, K] float32, from 0 to 1
  initial,  # [B, H, P, K, V] float32, one for each part, or None for zeros
  paired=None,  # [B, H, N, K, V] bfloat16
  *,
  parts=1,
  reverse=False,
  borders=True,
  value_tile=None,
  stages=2,
  interpret=None,
):
  """Runs the recurrence above in `parts` independent parts of the sequence.

  Returns a dictionary: "last" [B, H, P, K, V] float32, the last state of each part; with `borders`
  "borders" [B, H, N, K, V] bfloat16, the states that enter the chunks; with `paired` "overlap" [B,
  H, N, K] float32, the sum over V of the entering state times `paired`.
  """
  (B, T, H, K), V = a.shape, b.shape[-1]
  C, N, BV = CHUNK, T // CHUNK, value_tile or V
  M = N // parts
  out_type = {"last": jax.ShapeDtypeStruct((B, H, parts, K, V), jnp.float32)}
  scratch = {}
  if weight is not None:
    scratch["b"] = tile(C, BV)
  if borders:
    out_type["borders"] = jax.ShapeDtypeStruct((B, H, N, K, V), jnp.bfloat16)
    scratch["state"] = tile(2, K, BV)
  if paired is not None:
    # One row for each tile of values, so that no two blocks write the same numbers.
    out_type["overlap"] = jax.ShapeDtypeStruct((V // BV, B, H, N, K), jnp.float32)
    scratch["overlap"] = plgpu.SMEM((2, K), jnp.float32)

  def body(ins, outs, s):
    row, h = lax.axis_index("row"), lax.axis_index("head")
    value_index = lax.axis_index("value")
    bi, part = row // parts, lax.rem(row, parts)
    values = pl.ds(value_index * BV, BV)
    chunk_of = lambda n: part * M + (M - 1 - n if reverse else n)

    def step(index, *args):
      (n,) = index
      *blocks, state = args
      refs = dict(zip(specs, blocks, strict=True))
      slot = lax.rem(n, 2)
      if borders or paired is not None:
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
      copies = []
      if borders:
        s["state"].at[slot][...] = state.astype(jnp.bfloat16)
        target = outs["borders"].at[bi, h, chunk_of(n), :, values]
        copies.append((s["state"].at[slot], target))
      if paired is not None:
        s["overlap"].at[slot][...] = jnp.sum(load(refs["paired"]) * state, axis=1)
        target = outs["overlap"].at[value_index, bi, h, chunk_of(n)]
        copies.append((s["overlap"].at[slot], target))
      right = refs["b"]
      if weight is not None:
        weighted = load(refs["b"]) * across(rows_of(refs["weight"]), (C, BV))
        s["b"][...] = weighted.astype(jnp.bfloat16)
        right = s["b"]
      decayed = state * across(rows_of(refs["decay"]), (K, BV))
      # Also orders the reads above before the pipeline's next copies into the same buffers.
      plgpu.commit_smem()
      for source, target in copies:
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)
      if copies:
        plgpu.commit_smem_to_gmem_group()
      (state,) = multiply((decayed, [(turned(refs["a"]), right)]), interpret=interpret)
      return state

    start = zeros(K, BV)
    if initial is not None:
      start = plgpu.load(
        ins["initial"].at[bi, h, part, :, values], layout=plgpu.Layout.WGMMA, optimized=False
      )
    row_of = lambda x: bi if x.shape[0] > 1 else 0
    specs = {
      "a": tile_spec(C, K, lambda n: (chunk_of(n), 0)),
      "b": tile_spec(C, BV, lambda n: (chunk_of(n), 0)),
      "decay": plgpu.BlockSpec((K,), lambda n: (chunk_of(n) if decay.shape[2] > 1 else 0,)),
    }
    slices = [ins["a"].at[bi, :, h], ins["b"].at[bi, :, h, values]]
    slices.append(ins["decay"].at[row_of(decay), h])
    if weight is not None:
      moves = weight.shape[2] > C
      specs["weight"] = plgpu.BlockSpec((C,), lambda n: (chunk_of(n) if moves else 0,))
      slices.append(ins["weight"].at[row_of(weight), h])
    if paired is not None:
      specs["paired"] = tile_spec(K, BV, lambda n: (chunk_of(n), 0))
      slices.append(ins["paired"].at[bi, h, :, values])
    last = plgpu.emit_pipeline(
      step,
      grid=(M,),
      max_concurrent_steps=min(stages, M),
      init_carry=start,
      in_specs=list(specs.values()),
    )(*slices)
    outs["last"].at[bi, h, part, :, values][...] = last
    plgpu.wait_smem_to_gmem(0)

  inputs = {"a": a, "b": b, "decay": decay.reshape(*decay.shape[:2], -1)}
  optional = {"weight": weight, "initial": initial}
  inputs |= {name: x for name, x in optional.items() if x is not None}
  if paired is not None:
    inputs["paired"] = paired.reshape(B, H, N * K, V)
  results = plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=[scratch],
    grid=(V // BV, H, B * parts),
    grid_names=("value", "head", "row"),
    interpret=interpret,
    compiler_params=COMPILER_PARAMS,
  )(inputs)
  if paired is not None:
    results["overlap"] = results["overlap"].sum(0)
  return results

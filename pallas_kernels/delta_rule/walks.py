"""The state along the chunks, in registers: forwards with the outputs, backwards for its adjoint.

With S the state that enters a chunk, b = before, a = after, g = the chunk's decay:

    x  = inverse beta (v - b e S)     out  = b q S + scores x     S' = g S + (a k)^T x

and with A the adjoint of S', G the cotangent of out, the transposes of these lines:

    y  = inverse^T (a k A + scores^T G)     A' = g A + (b q)^T G - (b e)^T (beta y)

where beta y is the gradient of v. One block of threads has some columns of values of one head, for
which three products depend on one another in each chunk.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta_rule.tables import AFTER, BEFORE, DECAY, RATE, ROWS
from pallas_kernels.tensor_core import (
  CHUNK,
  COMPILER_PARAMS,
  across,
  in_32_bits,
  load,
  multiply,
  rows_of,
  turned,
  zeros,
)


@in_32_bits
def forward_walk(
  q,  # [B, T, H, K] bfloat16, T a multiple of the chunk
  k,  # [B, T, H, K] bfloat16
  erase_key,  # [B, T, H, K] bfloat16, or None for k
  v,  # [B, T, H, V] bfloat16
  inverse,  # [B, H, T, C] bfloat16
  scores,  # [B, H, T, C] bfloat16
  vectors,  # [B, H, N, ROWS, C] float32
  initial,  # [B, H, K, V] float32 or None
  *,
  scale,
  for_gradient,
  value_tile,
  stages,
  interpret=None,
):
  """Returns {"out" [B, T, H, V] bfloat16, "last" [B, H, K, V] float32} and, `for_gradient`, the
  states that enter the chunks, "borders" [B, H, N, K, V], and "x" [B, T, H, V], bfloat16."""
  bf16 = jnp.bfloat16

  def chunk(s, state, scr, interpret):
    rows = lambda n, shape: across(rows_of(s["vectors"].at[n]), shape)
    shape = s["v"].shape
    erase = s.get("erase_key", s["k"])
    old, out = multiply(
      (shape, [(erase, scr["borders"])]), (shape, [(s["q"], scr["borders"])]), interpret=interpret
    )
    before = rows(BEFORE, shape)
    scr["right"][...] = ((load(s["v"]) - before * old) * rows(RATE, shape)).astype(bf16)
    plgpu.commit_smem()
    (x,) = multiply((shape, [(s["inverse"], scr["right"])]), interpret=interpret)
    scr["x"][...] = x.astype(bf16)
    scr["left"][...] = (x * rows(AFTER, shape)).astype(bf16)
    plgpu.commit_smem()
    out, state = multiply(
      (out * before, [(s["scores"], scr["x"])]),
      (state * s["vectors"][DECAY, 0], [(turned(s["k"]), scr["left"])]),
      interpret=interpret,
    )
    scr["out"][...] = (out * scale).astype(bf16)
    return state

  inputs = {"q": q, "k": k, "erase_key": erase_key, "v": v}
  inputs |= {"inverse": inverse, "scores": scores, "vectors": vectors}
  scratch = ("right", "left", "x") if not for_gradient else ("right", "left")
  outputs = ("out", "x", "borders") if for_gradient else ("out",)
  return _walk(chunk, inputs, initial, outputs, scratch, False, value_tile, stages, interpret)


@in_32_bits
def backward_walk(
  q,  # [B, T, H, K] bfloat16, T a multiple of the chunk
  k,  # [B, T, H, K] bfloat16
  erase_key,  # [B, T, H, K] bfloat16, or None for k
  d_out,  # [B, T, H, V] bfloat16
  inverse,  # [B, H, T, C] bfloat16
  scores,  # [B, H, T, C] bfloat16
  vectors,  # [B, H, N, ROWS, C] float32
  d_last,  # [B, H, K, V] float32 or None
  *,
  value_tile,
  stages,
  interpret=None,
):
  """Returns {"y" [B, T, H, V] bfloat16, "last" [B, H, K, V] float32, the adjoint of the first
  state, "borders" [B, H, N, K, V] bfloat16, the adjoints of the states that leave the chunks}.
  """
  bf16 = jnp.bfloat16

  def chunk(s, adjoint, scr, interpret):
    rows = lambda n, shape: across(rows_of(s["vectors"].at[n]), shape)
    shape = s["v"].shape
    from_state, from_out = multiply(
      (shape, [(s["k"], scr["borders"])]),
      (shape, [(turned(s["scores"]), s["v"])]),
      interpret=interpret,
    )
    scr["right"][...] = (from_state * rows(AFTER, shape) + from_out).astype(bf16)
    plgpu.commit_smem()
    (y,) = multiply((shape, [(turned(s["inverse"]), scr["right"])]), interpret=interpret)
    before = rows(BEFORE, shape)
    scr["out"][...] = y.astype(bf16)
    scr["left"][...] = (y * (-before * rows(RATE, shape))).astype(bf16)
    scr["right"][...] = (load(s["v"]) * before).astype(bf16)
    plgpu.commit_smem()
    erase = s.get("erase_key", s["k"])
    (adjoint,) = multiply(
      (
        adjoint * s["vectors"][DECAY, 0],
        [(turned(s["q"]), scr["right"]), (turned(erase), scr["left"])],
      ),
      interpret=interpret,
    )
    return adjoint

  inputs = {"q": q, "k": k, "erase_key": erase_key, "v": d_out}
  inputs |= {"inverse": inverse, "scores": scores, "vectors": vectors}
  outputs = ("out", "borders")
  scratch = ("right", "left")
  results = _walk(chunk, inputs, d_last, outputs, scratch, True, value_tile, stages, interpret)
  results["y"] = results.pop("out")
  return results


def _walk(chunk, inputs, initial, outputs, scratch, reverse, value_tile, stages, interpret):
  """Calls `chunk(inputs, state, scratch, interpret)` for one chunk after the other.

  It finds the state in bfloat16 in scratch["borders"], returns the next and leaves what `outputs`
  names in scratch. "borders" is [K, columns]; the rest of `outputs` and `scratch`: [C, columns].
  """
  inputs = {name: x for name, x in inputs.items() if x is not None}
  (B, T, H, K), V = inputs["q"].shape, inputs["v"].shape[-1]
  C, N, BV = CHUNK, T // CHUNK, value_tile
  # Both operands of a product have the same swizzle, which the narrower one bounds.
  width = min(BV, 64)
  transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))
  tile = lambda *shape: plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)
  spec = lambda shape, index: plgpu.BlockSpec(shape, index, transforms=transforms)
  out_type = {"last": jax.ShapeDtypeStruct((B, H, K, V), jnp.float32)}
  for name in outputs:
    shape = (B, H, N, K, V) if name == "borders" else (B, T, H, V)
    out_type[name] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  scratch_types = {name: tile(C, BV) for name in scratch}
  scratch_types |= {name: tile(2, C, BV) for name in outputs}
  scratch_types["borders"] = tile(2, K, BV)

  def body(refs, initial_ref, outs, scr):
    b, h = lax.axis_index("row"), lax.axis_index("head")
    values = pl.ds(lax.axis_index("value") * BV, BV)
    chunk_of = lambda n: N - 1 - n if reverse else n

    def step(index, *args):
      (n,) = index
      *blocks, state = args
      slot = lax.rem(n, 2)
      two = {name: scr[name].at[slot] for name in (*outputs, "borders")}
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)
      two["borders"][...] = state.astype(jnp.bfloat16)
      plgpu.commit_smem()
      state = chunk(dict(zip(refs, blocks, strict=True)), state, {**scr, **two}, interpret)
      plgpu.commit_smem()
      for name in outputs:
        if name == "borders":
          target = outs[name].at[b, h, chunk_of(n), :, values]
        else:
          target = outs[name].at[b, pl.ds(chunk_of(n) * C, C), h, values]
        plgpu.copy_smem_to_gmem(two[name], target, commit_group=False)
      plgpu.commit_smem_to_gmem_group()
      return state

    start = zeros(K, BV)
    if initial_ref is not None:
      start = plgpu.load(
        initial_ref.at[b, h, :, values], layout=plgpu.Layout.WGMMA, optimized=False
      )
    specs, slices = [], []
    for name, ref in refs.items():
      if name == "v":
        specs.append(spec((C, BV), lambda n: (chunk_of(n), 0)))
        slices.append(ref.at[b, :, h, values])
      elif name == "vectors":
        specs.append(plgpu.BlockSpec((ROWS, C), lambda n: (chunk_of(n), 0)))
        slices.append(ref.at[b, h])
      elif name in ("inverse", "scores"):
        specs.append(spec((C, C), lambda n: (chunk_of(n), 0)))
        slices.append(ref.at[b, h])
      else:
        specs.append(spec((C, K), lambda n: (chunk_of(n), 0)))
        slices.append(ref.at[b, :, h])
    last = plgpu.emit_pipeline(
      step, grid=(N,), max_concurrent_steps=min(stages, N), init_carry=start, in_specs=specs
    )(*slices)
    outs["last"].at[b, h, :, values][...] = last
    plgpu.wait_smem_to_gmem(0)

  arrays = inputs | {"vectors": inputs["vectors"].reshape(B, H, -1, C)}
  kernel = lambda body: plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=[scratch_types],
    grid=(V // BV, H, B),
    grid_names=("value", "head", "row"),
    interpret=interpret,
    compiler_params=COMPILER_PARAMS,
  )
  if initial is None:
    return kernel(lambda refs, outs, scr: body(refs, None, outs, scr))(arrays)
  return kernel(body)(arrays, initial)

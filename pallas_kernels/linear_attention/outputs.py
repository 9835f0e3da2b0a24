"""The outputs, chunk after chunk, with the state in registers.

Inside a chunk the scores of its own steps multiply the values; the state that entered answers the
queries; then the chunk's keys and values go into the state. Two faces:

* `scalar_outputs`: one decay for all key channels. Scores are made here, and the decay multiplies
  rows of values and outputs, never keys or queries.
* `gated_outputs`: scores come from `scores.py`, and with decays a step so do queries and keys.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear_attention import gates
from pallas_kernels.linear_attention.chunk import channels_of, scores_of, steps_of
from pallas_kernels.linear_attention.walk import Prepare, Undecayed, decay_tile, walk
from pallas_kernels.tensor_core import (
  CHUNK,
  COMPILER_PARAMS,
  GROUP,
  across,
  alike,
  columns_of,
  down,
  in_32_bits,
  iota,
  load,
  multiply,
  rows_of,
  stage_for,
  staged,
  store_anywhere,
  tile,
  tile_spec,
  turned,
  zeros,
)


def scalar_outputs(
  q,  # [B, T, H, K] bfloat16, T a multiple of the chunk
  k,  # [B, T, H, K] bfloat16
  v,  # [B, T, H, V] bfloat16
  cumulative,  # [B|1, H, T|C] float32: the log decays, summed inside each chunk
  before,  # [B|1, H, T|C] float32: what is left of the entering state at each step
  after,  # [B|1, H, T|C] float32: what is left of each step in the leaving state
  decay,  # [B|1, H, N|1, K] float32: what a chunk leaves of the state
  segments,  # [B, T] int32 or None
  entering_sum,  # [B, H, N, K] float32, the normaliser's state at each border, or None
  initial,  # [B, H, P, K, V] float32 or None
  **options,
):
  """Returns (out, borders, last state, denominator) as `_outputs` does."""

  def chunk(s, state, scratch, interpret):
    C, BV = CHUNK, s["v"].shape[-1]
    scores, out = multiply(
      ((C, C), [(s["q"], turned(s["k"]))]),
      ((C, BV), [(s["q"], scratch["state"])]),
      interpret=interpret,
    )
    scores = jnp.where(visible(s), scores * row_decay(s["cumulative"]), 0.0)
    before_rows = rows_of(s["before"])
    denominator = None
    if "entering_sum" in s:
      from_sum = jnp.sum(load(s["q"]) * down(columns_of(s["entering_sum"]), s["q"].shape), axis=1)
      denominator = jnp.sum(scores, axis=1) + from_sum * before_rows
    left = staged(scores, scratch["scores"], interpret)
    scratch["v"][...] = (load(s["v"]) * across(rows_of(s["after"]), (C, BV))).astype(jnp.bfloat16)
    plgpu.commit_smem()
    out, state = multiply(
      (out * across(before_rows, (C, BV)), [(left, s["v"])]),
      (state, [(turned(s["k"]), scratch["v"])]),
      interpret=interpret,
    )
    return out, state, denominator

  inputs = {"q": q, "k": k, "v": v, "decay": decay}
  inputs |= {"cumulative": cumulative, "before": before, "after": after}
  inputs |= {"segments": segments, "entering_sum": entering_sum}
  scratch = lambda BV, interpret: {
    "scores": stage_for(CHUNK, CHUNK, interpret),
    "v": tile(CHUNK, BV),
  }
  return _outputs(chunk, inputs, initial, scratch, **options)


def gated_outputs(
  q,  # [B, T, H, K] bfloat16
  k,  # [B, T, H, K] bfloat16
  v,  # [B, T, H, V] bfloat16
  scores,  # [B, H, T, C] bfloat16
  score_sum,  # [B, H, T] float32, the sum of each row of scores, or None
  decay,  # `walk.Undecayed`; or `walk.Decays`, q decayed from the chunk's start, k to its end
  initial,  # [B, H, P, K, V] float32 or None
  sums,  # `walk.Sums` of the keys, for the normaliser, or None
  *,
  scale=1.0,
  borders=True,
  value_tile=None,
  interpret=None,
  **options,
):
  """Returns a dictionary: "out" [B, T, H, V] bfloat16; "last", and with `borders` "borders", as
  `walk` does; with `sums` "denominator" [B, H, T], "last_sum" [B, H, P, K] and, with `borders`,
  "sums" [B, H, N, K], the sums that enter the chunks, float32.
  """
  (B, T, H, _), V, C = q.shape, v.shape[-1], CHUNK
  value_tile = value_tile or V
  blocks = V // value_tile
  inputs = {"q": steps_of(q), "k": steps_of(k), "v": channels_of(v), "scores": scores_of(scores)}
  out_type = {"out": jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16)}
  prepared, vectors, kinds = {}, {}, (gates.BEFORE, gates.AFTER)
  undecayed = decay if isinstance(decay, Undecayed) else None
  if sums is not None:
    vectors |= sums.vectors | {"score_sum": score_sum}
    # One row for each tile of values, so that no two blocks write the same numbers.
    out_type["denominator"] = jax.ShapeDtypeStruct((blocks, B, H, T), jnp.float32)
    out_type |= sums.out_type(blocks, T // C if borders else 0)
    prepared["denominator"] = jax.ShapeDtypeStruct((C,), jnp.float32)

  def begin(at, part, ins, held):
    if sums is not None:
      sums.start(held, at, part, ins)
    made = [None if undecayed is None else undecayed.factors(x, at, ins) for x in kinds]
    return decay.leaving(ins), *made

  def step(fixed, at, tiles, ins, outs, held, wait):
    leaving, *factors = fixed
    of_chunk = []
    if undecayed is not None:
      of_chunk = [undecayed.of_chunk(*x, at, ins) for x in zip(kinds, factors, strict=True)]

    def decay_tiles():
      wait()
      for name, how in zip("qk", of_chunk, strict=False):
        decay_tile(tiles[name], *how)

    if sums is None:
      decay_tiles()
      return None
    of_block = {name: outs[name].at[block_of(at), at.b, at.h] for name in own if name in outs}
    left = leaving(at)
    denominator = rows_of(ins["score_sum"].at[at.b, at.h, at.steps])
    if borders:
      sums.put(held, of_block["sums"].at[at.n])
    decay_tiles()
    for start in range(0, q.shape[3], GROUP):  # by 64 channels, for want of registers
      channels = pl.ds(start, GROUP)
      queries = load(tiles["q"].at[:, channels])
      entering = down(columns_of(held["sum"].at[channels]), queries.shape)
      denominator = denominator + jnp.sum(queries * entering, axis=1)
    tiles["denominator"][...] = denominator
    store_anywhere(of_block["denominator"].at[at.steps], denominator)
    return lambda: sums.add(held, tiles["k"], left, interpret)

  def end(at, part, outs, held):
    if sums is not None:
      sums.put(held, outs["last_sum"].at[block_of(at), at.b, at.h, part])

  def block_of(at):
    return at.group // (value_tile // GROUP)

  def carry(at, tiles, outs, state, left):
    del at, outs, state
    out, state = multiply(
      ((C, GROUP), [(tiles["scores"], tiles["v"]), (tiles["q"], tiles["state"])]),
      (left, [(turned(tiles["k"]), tiles["v"])]),
      interpret=interpret,
    )
    if sums is not None:
      out = out / across(rows_of(tiles["denominator"]), out.shape)
    return state, out * scale if scale != 1.0 else out

  own = "denominator", "sums", "last_sum"
  results = walk(
    *(carry, None if undecayed is None and sums is None else Prepare(begin, step, end)),
    *(inputs, decay, vectors, initial, out_type),
    shape=(*q.shape, V),
    borders=borders,
    prepared=prepared,
    held=None if sums is None else sums.held,
    value_tile=value_tile,
    interpret=interpret,
    **options,
  )
  return results | {name: results[name][0] for name in own if name in results}


@in_32_bits
def _outputs(
  chunk,
  inputs,
  initial,
  scratch,
  *,
  scale=1.0,
  parts=1,
  borders=True,
  value_tile=None,
  stages=2,
  interpret=None,
):
  """Walks the chunks of each part of each sequence and head.

  Returns `out` [B, T, H, V] bfloat16; the states that enter the chunks [B, H, N, K, V] bfloat16
  (None unless `borders`); the last state of each part [B, H, P, K, V] float32; and the denominator
  [B, H, T] float32 (None without `entering_sum`).
  """
  inputs = {name: x for name, x in inputs.items() if x is not None}
  (B, T, H, K), V = inputs["q"].shape, inputs["v"].shape[-1]
  C, N, BV = CHUNK, T // CHUNK, value_tile or V
  M = N // parts
  normalize = "entering_sum" in inputs
  out_type = {
    "out": jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16),
    "last": jax.ShapeDtypeStruct((B, H, parts, K, V), jnp.float32),
  }
  if borders:
    out_type["borders"] = jax.ShapeDtypeStruct((B, H, N, K, V), jnp.bfloat16)
  if normalize:
    # One row for each tile of values, so that no two blocks write the same numbers.
    out_type["denominator"] = jax.ShapeDtypeStruct((V // BV, B, H, T), jnp.float32)
  scratch_types = {"state": tile(2, K, BV), "out": tile(2, C, BV), **scratch(BV, interpret)}
  if normalize:
    scratch_types["denominator"] = plgpu.SMEM((2, C), jnp.float32)

  def body(refs, initial_ref, outs, scr):
    row, h = lax.axis_index("row"), lax.axis_index("head")
    tile_index = lax.axis_index("value")
    b, part = row // parts, lax.rem(row, parts)
    values = pl.ds(tile_index * BV, BV)
    names = list(refs)

    def step(index, *args):
      (n,) = index
      *blocks, state = args
      s = dict(zip(names, blocks, strict=True))
      slot = lax.rem(n, 2)
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)
      scr["state"].at[slot][...] = state.astype(jnp.bfloat16)
      plgpu.commit_smem()
      state = state * across(rows_of(s["decay"]), (K, BV))
      local = {**scr, "state": scr["state"].at[slot]}
      out, state, denominator = chunk(s, state, local, interpret)
      steps = pl.ds((part * M + n) * C, C)
      if normalize:
        out = out / across(denominator, (C, BV))
        scr["denominator"].at[slot][...] = denominator
      scr["out"].at[slot][...] = (out * scale if scale != 1.0 else out).astype(jnp.bfloat16)
      plgpu.commit_smem()
      group = {"commit_group": False}
      if normalize:
        plgpu.copy_smem_to_gmem(
          scr["denominator"].at[slot], outs["denominator"].at[tile_index, b, h, steps], **group
        )
      if borders:
        plgpu.copy_smem_to_gmem(
          scr["state"].at[slot], outs["borders"].at[b, h, part * M + n, :, values], **group
        )
      plgpu.copy_smem_to_gmem(scr["out"].at[slot], outs["out"].at[b, steps, h, values], **group)
      plgpu.commit_smem_to_gmem_group()
      return state

    start = zeros(K, BV)
    if initial_ref is not None:
      start = plgpu.load(
        initial_ref.at[b, h, part, :, values], layout=plgpu.Layout.WGMMA, optimized=False
      )
    specs, slices = [], []
    for name, ref in refs.items():
      spec, piece = _block(name, inputs[name], ref, b, h, values, K, BV, part * M)
      specs.append(spec)
      slices.append(piece)
    last = plgpu.emit_pipeline(
      step, grid=(M,), max_concurrent_steps=min(stages, M), init_carry=start, in_specs=specs
    )(*slices)
    outs["last"].at[b, h, part, :, values][...] = last
    plgpu.wait_smem_to_gmem(0)

  flat = {name: _flat(name, x) for name, x in inputs.items()}
  kernel = lambda body: plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=[scratch_types],
    grid=(V // BV, H, B * parts),
    grid_names=("value", "head", "row"),
    interpret=interpret,
    compiler_params=COMPILER_PARAMS,
  )
  if initial is None:
    results = kernel(lambda refs, outs, scr: body(refs, None, outs, scr))(flat)
  else:
    results = kernel(body)(flat, initial)
  denominator = results["denominator"][0] if normalize else None
  return results["out"], results.get("borders"), results["last"], denominator


def _flat(name, x):
  """Vectors of a chunk are copied as pieces of one long axis."""
  return x.reshape(*x.shape[:2], -1) if name in ("decay", "entering_sum") else x


def _block(name, x, ref, b, h, values, K, BV, first):
  """The pipeline's block of input `name`, and the part of it that this kernel walks along."""
  C = CHUNK
  row = b if x.shape[0] > 1 else 0
  if name in ("q", "k"):
    return tile_spec(C, K, lambda n: (first + n, 0)), ref.at[b, :, h]
  if name == "v":
    return tile_spec(C, BV, lambda n: (first + n, 0)), ref.at[b, :, h, values]
  if name == "segments":
    return plgpu.BlockSpec((C,), lambda n: (first + n,)), ref.at[b]
  if name in ("decay", "entering_sum"):
    moves = x.shape[2] > 1
    return plgpu.BlockSpec((K,), lambda n: (first + n if moves else 0,)), ref.at[row, h]
  moves = x.shape[2] > C
  return plgpu.BlockSpec((C,), lambda n: (first + n if moves else 0,)), ref.at[row, h]


def row_decay(cumulative, *, turned=False):
  """[C, C]: exp of the decay from step j to step i, 1 where j is the later one. Rows are i, or j if
  `turned`."""
  shape = (CHUNK, CHUNK)
  lag = across(rows_of(cumulative), shape) - down(columns_of(cumulative), shape)
  return jnp.exp(jnp.minimum(-lag if turned else lag, 0.0))


def visible(s):
  """[C, C]: whether output i may see step j."""
  shape = (CHUNK, CHUNK)
  mask = iota(shape, 0) >= iota(shape, 1)
  if "segments" in s:
    mask = mask & alike(s["segments"])
  return mask

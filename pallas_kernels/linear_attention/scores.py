"""Scores inside each chunk when the decay differs from one key channel to the next.

    scores_ij = sum_k q_ik k_jk exp(sum of the log decays of channel k over the steps between)

All chunks at once, a block of threads for each or for a few. Decays a step are read here only: so
also returned are the queries decayed from the chunk's start and the keys decayed to its end.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear_attention import gates, shapes
from pallas_kernels.linear_attention.chunk import Place, gate_scratch, make_gate, same_segment
from pallas_kernels.tensor_core import (
  CHUNK,
  COMPILER_PARAMS,
  GROUP,
  across,
  columns_of,
  down,
  in_32_bits,
  iota,
  load,
  multiply,
  rows_of,
  scaled,
  stage_for,
  staged,
  sum_of_rows,
  tile,
  turned,
  unit,
)


def chunk_scores(
  q,  # [B, T, H, K] bfloat16, T a multiple of the chunk
  k,  # [B, T, H, K] bfloat16
  log_decay,  # [H, K] or [B, T, H, K] float32
  bonus,  # [H, K] float32 or None
  segments,  # [B, T] int32 or None
  reach,  # [2, B, T] float32: whether a step sees the entering state, reaches the leaving; or None
  *,
  length,  # steps before padding
  decayed_q=True,
  decayed_k=True,
  sums=False,
  interpret=None,
):
  """Returns a dictionary of

  scores [B, H, T, C] bfloat16; with `decayed_q`, `decayed_k` q and k [B, T, H, K] bfloat16, decayed
  from the chunk's start and to its end; with `sums` also score_sum [B, H, T] float32, of rows; and
  for decays a step decay [B, H, N, K] float32, of whole chunks.
  """
  inputs = {"q": q, "k": k, "log_decay": log_decay}
  optional = {"bonus": bonus, "segments": segments, "reach": reach}
  inputs |= {name: x for name, x in optional.items() if x is not None}
  decayed = [name for name, wanted in (("q", decayed_q), ("k", decayed_k)) if wanted]
  return _chunk_scores(inputs, decayed, length=length, sums=sums, interpret=interpret)


@in_32_bits
def _chunk_scores(inputs, decayed, *, length, sums, interpret):
  q, log_decay = inputs["q"], inputs["log_decay"]
  read_first = "bonus" in inputs
  B, T, H, K = q.shape
  C, N = CHUNK, T // CHUNK
  per_step = log_decay.ndim == 4
  f32, bf16 = jnp.float32, jnp.bfloat16
  out_type = {name: jax.ShapeDtypeStruct(q.shape, bf16) for name in decayed}
  out_type["scores"] = jax.ShapeDtypeStruct((B, H, T, C), bf16)
  if sums:
    out_type["score_sum"] = jax.ShapeDtypeStruct((B, H, T), f32)
  if per_step:
    out_type["decay"] = jax.ShapeDtypeStruct((B, H, N, K), f32)
  # A block of threads has several chunks, and fetches the next while it works on one; the decays of
  # every step leave no room for that.
  together = 1 if per_step else shapes.chunks_together(B * H * N)
  slots = min(2, together)
  scratch = {
    "q": tile(slots, C, K),
    "k": tile(slots, C, K),
    "right": tile(C, K),
    "scores": tile(C, C),
    "left": stage_for(C, K, interpret),
    "arrived": plgpu.Barrier(num_barriers=2 * slots),
    "rows": plgpu.SMEM((C,), f32),
    "columns": plgpu.SMEM((K,), f32),
    **gate_scratch(log_decay, K),
    "largest": plgpu.SMEM((2 * CHUNK,), f32),
  }
  if per_step:
    scratch["unit"] = tile(C, GROUP)
  groups = [pl.ds(start, GROUP) for start in range(0, K, GROUP)]

  def body(ins, outs, s):
    b, h, start = (lax.axis_index(name) for name in ("row", "head", "chunk"))
    start = start * together
    count = jnp.minimum(together, N - start)

    def copies_of(index):
      steps, slot = pl.ds((start + index) * CHUNK, CHUNK), lax.rem(index, slots)
      for number, name in enumerate(("q", "k")):
        barrier = s["arrived"].at[2 * slot + number]
        yield ins[name].at[b, steps, h], s[name].at[slot], barrier

    def fetch(index):
      for source, target, barrier in copies_of(index):
        plgpu.copy_gmem_to_smem(source, target, barrier)

    def step(index, carry):
      # What the chunk before has left must be read before anything is written there.
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      if slots > 1:
        pl.when(index + 1 < count)(lambda: fetch(index + 1))
      at = Place(b, h, start + index, 0)
      slot = lax.rem(index, slots)
      here = dict(s) | {name: s[name].at[slot] for name in ("q", "k")}
      arrived = lambda: [plgpu.barrier_wait(barrier) for _, _, barrier in copies_of(index)]
      chunk(at, first, ins, outs, here, arrived)
      return carry

    fetch(0)
    first = None
    if per_step:
      unit(s["unit"])
    else:
      rates = [-columns_of(ins["log_decay"].at[h, channels]) for channels in groups]
      first = gates.superfluous_for(functools.reduce(jnp.maximum, rates), s["largest"])
    if together == 1:
      step(0, None)
    else:
      lax.fori_loop(0, count, step, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  def chunk(at, first, ins, outs, s, arrived):
    b, h, n = at.b, at.h, at.n
    signs = gates.Signs(s["signs"], read_first) if per_step else None
    made = [
      make_gate(
        *(ins["log_decay"], first, {x: s[x].at[:, channels] for x in ("high", "low") if x in s}),
        *(b, h, n, channels),
        length=length,
        read_first=read_first,
        interpret=interpret,
        signs=signs,
      )
      for channels in groups
    ]
    arrived()

    def met(factors):
      """[C, C]: queries times keys, each with its factor."""
      products = []
      for channels, factor in zip(groups, factors, strict=True):
        left, right = factor()
        right_s = s["right"].at[:, channels]
        right_s[...] = scaled(s["k"].at[:, channels], right)
        left_s = s["left"].at[:, channels] if interpret is not None else s["left"]
        left = staged(scaled(s["q"].at[:, channels], left), left_s, interpret)
        products.append((left, turned(right_s)))
      plgpu.commit_smem()
      return multiply(((C, C), products), interpret=interpret)[0]

    def of_blocks(scores, open_rows):
      in_block = met([gate.in_block for gate in made])
      return jnp.where(gates.in_block_pairs(made[0].first) & open_rows, in_block, scores)

    def merge(scores, open_rows, index):
      size = gates.half_of(index)
      both = [lambda gate=gate: (gate.merged(size),) * 2 for gate in made]
      return jnp.where(gates.merged_pairs(size) & open_rows, met(both), scores)

    scores = jnp.where(_earlier_by(0), _same_step(ins, s, h, interpret), 0.0)
    if per_step:
      scores, closed_rows, all_closed = _from_start(scores, made, met, ins, s, at)
      still_open = lambda: across(closed_rows, (C, C)) == 0
      blocks = lambda index, scores: of_blocks(scores, still_open())
      scores = lax.fori_loop(0, jnp.where(all_closed, 0, 1), blocks, scores)
      merges = jnp.where(all_closed, 0, gates.MERGES)
      scores = lax.fori_loop(0, merges, lambda i, x: merge(x, still_open(), i), scores)
    else:
      scores = of_blocks(scores, True)
      scores = lax.fori_loop(first, gates.MERGES, lambda i, x: merge(x, True, i), scores)
    for channels, gate in zip(groups, made, strict=True):
      for row, (name, factor) in enumerate({"q": gate.before, "k": gate.after}.items()):
        if name in decayed:
          x = scaled(s[name].at[:, channels], factor())
          if "reach" in ins:
            seen = rows_of(ins["reach"].at[row, b, at.steps])
            x = jnp.where(across(seen, (C, GROUP)) > 0, x, jnp.bfloat16(0.0))
          s[name].at[:, channels][...] = x
    plgpu.commit_smem()
    if per_step:
      for channels in groups:
        both = [s[name].at[:, channels] for name in ("high", "low")]
        s["columns"].at[channels][...] = jnp.exp2(sum_of_rows(both, s["unit"], interpret))

    if "segments" in ins:
      scores = jnp.where(same_segment(ins, at), scores, 0.0)
    s["scores"][...] = scores.astype(bf16)
    copies = [(s["scores"], outs["scores"].at[b, h, at.steps])]
    copies += [(s[name], outs[name].at[b, at.steps, h]) for name in decayed]
    if sums:
      s["rows"][...] = jnp.sum(scores, axis=1)
      copies.append((s["rows"], outs["score_sum"].at[b, h, at.steps]))
    if per_step:
      copies.append((s["columns"], outs["decay"].at[b, h, n]))
    plgpu.commit_smem()
    for source, target in copies:
      plgpu.copy_smem_to_gmem(source, target)

  return plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=[scratch],
    grid=(-(-N // together), H, B),
    grid_names=("chunk", "head", "row"),
    interpret=interpret,
    compiler_params=COMPILER_PARAMS,
  )(inputs)


def _from_start(scores, made, met, ins, s, at):
  """Scores of the rows, from the first on, whose pairs can all meet at the chunk's start.

  There the keys' factors grow, as far as 2^92; beyond, and in rows of another segment than the
  first step's, pairs are left to blocks and merges. So a score depends, to the last bit, on nothing
  that follows it and on no other segment: not even in how it is computed.

  Returns:
    scores, [C] float32, 1 for such rows, and whether all are.
  """
  sums = [gate.from_start() for gate in made]
  lowest = None
  for queries, _ in sums:
    of_group = jnp.min(queries, axis=1)
    lowest = of_group if lowest is None else jnp.minimum(lowest, of_group)
  lowest_s = s["largest"].at[pl.ds(0, CHUNK)]
  lowest_s[...] = lowest
  plgpu.commit_smem()
  closed = lowest >= -gates.LARGEST_LOG2
  all_closed = lowest_s[CHUNK - 1] >= -gates.LARGEST_LOG2  # sums only fall
  if "segments" in ins:
    of_chunk = ins["segments"].at[at.b, at.steps]
    closed = closed & (rows_of(of_chunk) == of_chunk[0])
    all_closed = all_closed & (of_chunk[CHUNK - 1] == of_chunk[0])
  closed = jnp.where(closed, jnp.float32(1.0), jnp.float32(0.0))
  grown = lambda keys: jnp.exp2(jnp.minimum(-keys, gates.LARGEST_LOG2))
  product = met([lambda x=x: (jnp.exp2(x[0]), grown(x[1])) for x in sums])
  rows = across(closed, product.shape) > 0
  return jnp.where(_earlier_by(1) & rows, product, scores), closed, all_closed


def _earlier_by(steps):
  """[C, C]: whether key j is step i (0), or any step before it (1)."""
  i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
  return i > j if steps else i == j


def _same_step(ins, s, h, interpret):
  """[C, C], right on the diagonal: q_i k_i, weighted by the bonus if there is one."""
  keys = turned(s["k"])
  if "bonus" not in ins:
    return multiply(((CHUNK, CHUNK), [(s["q"], keys)]), interpret=interpret)[0]
  weight = lambda channels: down(columns_of(ins["bonus"].at[h, channels]), (CHUNK, GROUP))
  products = []
  for start in range(0, s["q"].shape[-1], GROUP):
    channels = pl.ds(start, GROUP)
    left_s = s["left"].at[:, channels] if interpret is not None else s["left"]
    left = staged(load(s["q"].at[:, channels]) * weight(channels), left_s, interpret)
    products.append((left, turned(s["k"].at[:, channels])))
  return multiply(((CHUNK, CHUNK), products), interpret=interpret)[0]

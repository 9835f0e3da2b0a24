"""What happens inside each chunk without its state: the triangular systems and the scores.

All chunks at once. With L_ij = (e_i . k_j) decay_ij for j < i, each chunk gets

    inverse = (I + diag(beta) L)^-1      scores_ij = (q_i . k_j) decay_ij for j <= i
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta_rule.inverse import TILES, diagonal_blocks, inverse
from pallas_kernels.delta_rule.tables import CUMULATIVE, RATE, ROWS
from pallas_kernels.linear_attention.chunk import each_chunk, fetch, same_segment
from pallas_kernels.linear_attention.outputs import row_decay
from pallas_kernels.tensor_core import (
  CHUNK,
  across,
  in_32_bits,
  iota,
  multiply,
  rows_of,
  tile,
  turned,
)


@in_32_bits
def chunk_systems(
  q,  # [B, T, H, K] bfloat16, T a multiple of the chunk
  k,  # [B, T, H, K] bfloat16
  erase_key,  # [B, T, H, K] bfloat16, or None for k
  vectors,  # [B, H, N, ROWS, C] float32
  segments,  # [B, T] int32 or None
  *,
  interpret=None,
):
  """Returns {"inverse", "scores"}, both [B, H, T, C] bfloat16."""
  B, T, H, K = q.shape
  C = CHUNK
  result = jax.ShapeDtypeStruct((B, H, T, C), jnp.bfloat16)
  tiles = {"q": q, "k": k} | ({} if erase_key is None else {"erase_key": erase_key})
  scratch = {name: tile(C, K) for name in tiles} | {
    "blocks": diagonal_blocks(),
    "vectors": vectors_scratch(),
  }
  scratch |= {"scores": tile(C, C), "arrived": plgpu.Barrier(num_barriers=len(tiles) + 1)}
  places = [(name, pl.ds(start, C)) for name in tiles for start in range(0, K, C)][: TILES - 1]
  scratch["more"] = [tile(C, C) for _ in range(TILES - len(places))]

  def body(at, ins, outs, s):
    pieces = {n: (ins[n].at[at.b, at.steps, at.h], s[n]) for n in tiles}
    fetch(pieces | table(ins, s, at), s["arrived"])
    rows = s["vectors"]
    gram, scores = multiply(
      ((C, C), [(s["k" if erase_key is None else "erase_key"], turned(s["k"]))]),
      ((C, C), [(s["q"], turned(s["k"]))]),
      interpret=interpret,
    )
    mask = iota((C, C), 0) >= iota((C, C), 1)
    if segments is not None:
      mask = mask & same_segment(ins, at)
    weight = jnp.where(mask, row_decay(rows.at[CUMULATIVE]), 0.0)
    s["scores"][...] = (scores * weight).astype(jnp.bfloat16)
    weight = jnp.where(iota((C, C), 0) > iota((C, C), 1), weight, 0.0)
    lower = gram * weight * across(rows_of(rows.at[RATE]), (C, C))
    # The queries and keys have been used: their memory, and some more.
    free = [s[name].at[:, columns] for name, columns in places] + list(s["more"])
    result = inverse(lower, s["blocks"], free, interpret)
    whole = s["more"][-1]  # copies begin at whole tiles only
    whole[...] = result.astype(jnp.bfloat16)
    send(
      [
        (whole, outs["inverse"].at[at.b, at.h, at.steps]),
        (s["scores"], outs["scores"].at[at.b, at.h, at.steps]),
      ]
    )

  inputs = tiles | {"vectors": vectors}
  inputs |= {} if segments is None else {"segments": segments}
  return each_chunk(
    body,
    inputs,
    {"inverse": result, "scores": result},
    scratch,
    sizes=(1, T // C, H, B),
    interpret=interpret,
  )


def vectors_scratch():
  """Shared memory for a chunk's table."""
  return plgpu.SMEM((ROWS, CHUNK), jnp.float32)


def table(ins, s, at):
  """For `fetch`: the chunk's table."""
  return {"vectors": (ins["vectors"].at[at.b, at.h, at.n], s["vectors"])}


def send(copies):
  """Copies from shared to device memory, all pairs (source, target), until the sources are free."""
  plgpu.commit_smem()
  for source, target in copies:
    plgpu.copy_smem_to_gmem(source, target)
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)

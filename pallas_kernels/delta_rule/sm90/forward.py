"""Forward pass of the delta rule over chunks.

First `chunk_inverses`, all chunks at once: the inverse of each chunk's triangular system; with
decays per key channel `channel_chunks`, which also decays queries and keys. Then
`recurrence.forward_recurrence` carries the state along the chunks and computes the outputs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries
from pallas_kernels.core.chunk_grid import (
  decay_between_tokens,
  launch_per_chunk,
  shared_head,
  store_outputs,
)
from pallas_kernels.core.wgmma import (
  WITHOUT_BARRIERS,
  Backend,
  broadcast_rows,
  causal_mask,
  load_row_vector,
  smem_tile,
  transpose_ref,
  with_int32_indices,
)
from pallas_kernels.delta_rule.sm90.channel_chunks import (
  ChunkInputs,
  decayed_chunks,
  decayed_stage,
)
from pallas_kernels.delta_rule.sm90.recurrence import Stage, forward_recurrence, split_maps
from pallas_kernels.delta_rule.sm90.splits import entering_states
from pallas_kernels.delta_rule.triangular_inverse import (
  NUM_TILES,
  diagonal_blocks,
  triangular_inverse,
)
from pallas_kernels.delta_rule.types import (
  CUMULATIVE,
  NUM_ROWS,
  RATE,
  Inputs,
  Options,
  Residuals,
  chunk_tables,
  rate_tables,
)


def forward(
  options: Options, inputs: Inputs, segments: jax.Array | None, *, for_gradient: bool
) -> tuple[tuple[jax.Array, jax.Array], Residuals | None]:
  """The results of `op.delta_rule`, and what the backward pass needs of this one."""
  q, k, erase_key, v, beta, log_decay, kv, write_key = inputs
  config = options.config
  documents = DocumentBoundaries.of(segments, config.chunk)
  chunks = None
  if inputs.channels:
    tables = rate_tables(config.chunk, q.shape[1], beta)
    chunks = decayed_chunks(
      ChunkInputs(q, k, erase_key, log_decay, tables, documents, write_key),
      heads=inputs.heads,
      erase_before_decay=options.erase_before_decay,
      chunk=config.chunk,
      backend=options.backend,
    )
    chunks = chunks._replace(decay=documents.reset(chunks.decay, config.chunk))
    stage, inverse = decayed_stage(chunks, v, tables), chunks.inverse
  else:
    tables = chunk_tables(options, documents, q.shape[1], beta, log_decay)
    inverse = chunk_inverses(
      k, erase_key, tables, documents, chunk=config.chunk, backend=options.backend
    )
    stage = Stage(erase_key, inverse, k, q, v, tables, documents.segment_ids)
  P = options.num_splits
  static: Any = {"heads": inputs.heads, "chunk": config.chunk, "backend": options.backend}
  static["num_splits"] = P
  initial, maps = transposed(kv), None
  if P == 1:
    entering = None if initial is None else initial[:, :, None]
  else:
    # Queries and documents are part of scores only, which the state does not need.
    values = stage._replace(q=None, segment_ids=None, pairs=None, write_scores=None)
    maps = split_maps(values, config=config.maps, **static)
    entering = entering_states(maps, initial)
  results = forward_recurrence(
    stage,
    entering,
    scale=options.scale,
    for_gradient=for_gradient,
    config=config.forward,
    **static,
  )
  residuals = None
  if for_gradient:
    residuals = Residuals(inverse, results.corrections, results.states, maps, chunks)
  return (results.out, transposed(results.last_state[:, :, -1])), residuals


def transposed(state: Any) -> Any:
  """[..., V, K] of [..., K, V], or the other way round."""
  return None if state is None else state.swapaxes(-1, -2)


class _Keys(NamedTuple):
  """Arrays, GMEM references or tiles."""

  k: Any
  erase_key: Any


class _Arrays(NamedTuple):
  keys: _Keys
  tables: Any
  documents: DocumentBoundaries


class _Buffers(NamedTuple):
  keys: _Keys  # [C, K]
  tables: Any  # [NUM_ROWS, C] float32
  blocks: Any  # of `triangular_inverse`
  more: list  # tiles [C, C]
  arrived_barrier: Any  # of the table, then of keys


@with_int32_indices
def chunk_inverses(
  k: jax.Array,  # [B, T, H or fewer, K] bfloat16, T a multiple of the chunk
  erase_key: jax.Array | None,  # [B, T, H or fewer, K] bfloat16, or None for k
  tables: jax.Array,  # [B, H, N, NUM_ROWS, C] float32
  documents: DocumentBoundaries,
  *,
  chunk: int,
  backend: Backend,
) -> jax.Array:
  """[B, H, T, C] bfloat16: the inverse of each chunk's triangular system, which needs no state.

  With L_ij = (e_i . k_j) decay_ij for j < i it is (I + diag(beta) L)^-1.
  """
  (B, T, _, K), H = k.shape, tables.shape[1]
  C = chunk
  keys = _Keys(k, erase_key)
  present = sum(x is not None for x in keys)
  # The inverse works in the memory of keys, when these are dead, and some more.
  num_more = max(1, NUM_TILES - present * (K // C))
  scratch = _Buffers(
    keys=_Keys(*(None if x is None else smem_tile(C, K) for x in keys)),
    tables=plgpu.SMEM((NUM_ROWS, C), jnp.float32),
    blocks=diagonal_blocks(),
    more=[smem_tile(C, C) for _ in range(num_more)],
    arrived_barrier=plgpu.Barrier(num_barriers=present + 1),
  )

  def body(at, gmem: _Arrays, out, smem: _Buffers):
    sources = [gmem.tables.at[at.batch, at.head, at.chunk]]
    for source in gmem.keys:
      if source is not None:
        sources.append(source.at[at.batch, at.tokens, shared_head(at.head, H, source)])
    tiles = [x for x in smem.keys if x is not None]
    for number, (source, target) in enumerate(zip(sources, [smem.tables, *tiles], strict=True)):
      plgpu.copy_gmem_to_smem(source, target, smem.arrived_barrier.at[number])
    mask = gmem.documents.mask(at, causal_mask(C, strict=True))
    plgpu.barrier_wait(smem.arrived_barrier.at[0])
    rate = broadcast_rows(load_row_vector(smem.tables.at[RATE]), (C, C))
    weight = jnp.where(mask, decay_between_tokens(smem.tables.at[CUMULATIVE]) * rate, 0.0)
    for number in range(present):
      plgpu.barrier_wait(smem.arrived_barrier.at[number + 1])
    lower = backend.dot(tiles[-1], transpose_ref(smem.keys.k)) * weight
    # Keys are dead: their last product is done.
    blocks = [x.at[:, pl.ds(start, C)] for x in tiles for start in range(0, K, C)]
    free = [*blocks[: NUM_TILES - 1], *smem.more]
    inverse = triangular_inverse(lower, smem.blocks, free, backend)
    inverse_smem = smem.more[-1]  # a whole tile, where copies begin; dead, as all of `free`
    inverse_smem[...] = inverse.astype(jnp.bfloat16)
    store_outputs([(inverse_smem, out.at[at.batch, at.head, at.tokens])])

  return launch_per_chunk(
    body,
    _Arrays(keys, tables, documents.mask_only),
    jax.ShapeDtypeStruct((B, H, T, C), jnp.bfloat16),
    scratch,
    sizes=(1, T // C, H, B),
    chunk=C,
    name="delta_rule_chunk_inverses",
    backend=backend,
    compiler_params=WITHOUT_BARRIERS,
  )

"""Forward pass of the delta rule over chunks.

First `chunk_systems`, all chunks at once: each chunk's triangular system and its scores. Then
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
  load_inputs,
  shared_head,
  store_outputs,
)
from pallas_kernels.core.wgmma import (
  Backend,
  Dots,
  broadcast_rows,
  causal_mask,
  load_row_vector,
  smem_tile,
  transpose_ref,
  with_int32_indices,
)
from pallas_kernels.delta_rule.sm90.recurrence import Stage, forward_recurrence
from pallas_kernels.delta_rule.sm90.triangular_inverse import (
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
)


def forward(
  options: Options, inputs: Inputs, segments: jax.Array | None, *, for_gradient: bool
) -> tuple[tuple[jax.Array, jax.Array], Residuals | None]:
  """The results of `op.delta_rule`, and what the backward pass needs of this one."""
  q, k, erase_key, v, beta, log_decay, kv = inputs
  config = options.config
  documents = DocumentBoundaries.of(segments, config.chunk)
  tables = chunk_tables(options, documents, q.shape[1], beta, log_decay)
  inverse, scores = chunk_systems(
    q, k, erase_key, tables, documents, chunk=config.chunk, backend=options.backend
  )
  results = forward_recurrence(
    Stage(erase_key, inverse, k, q, scores, v, tables),
    kv,
    heads=inputs.heads,
    scale=options.scale,
    for_gradient=for_gradient,
    config=config.forward,
    chunk=config.chunk,
    backend=options.backend,
  )
  residuals = None
  if for_gradient:
    residuals = Residuals(inverse, scores, x=results.corrections, states=results.states)
  return (results.out, results.last_state), residuals


class _SystemInputs(NamedTuple):
  """Arrays, GMEM references or tiles."""

  erase_key: Any
  k: Any
  q: Any


class _SystemArrays(NamedTuple):
  keys: _SystemInputs
  tables: Any
  documents: DocumentBoundaries


class _SystemBuffers(NamedTuple):
  keys: _SystemInputs  # [C, K]
  tables: Any  # [NUM_ROWS, C] float32
  blocks: Any  # of `triangular_inverse`
  scores: Any  # [C, C]
  more: list  # tiles [C, C]
  arrived_barrier: Any


class ChunkSystems(NamedTuple):
  """Results of `chunk_systems`, both [B, H, T, C] bfloat16."""

  inverse: Any
  scores: Any


@with_int32_indices
def chunk_systems(
  q: jax.Array,  # [B, T, H or fewer, K] bfloat16, T a multiple of the chunk
  k: jax.Array,  # [B, T, H or fewer, K] bfloat16
  erase_key: jax.Array | None,  # [B, T, H or fewer, K] bfloat16, or None for k
  tables: jax.Array,  # [B, H, N, NUM_ROWS, C] float32
  documents: DocumentBoundaries,
  *,
  chunk: int,
  backend: Backend,
) -> ChunkSystems:
  """Computes triangular systems and scores inside each chunk, which do not need the state.

  With L_ij = (e_i . k_j) decay_ij for j < i, each chunk gets

      inverse = (I + diag(beta) L)^-1      scores_ij = (q_i . k_j) decay_ij for j <= i
  """
  (B, T, _, K), H = q.shape, tables.shape[1]
  C = chunk
  keys = _SystemInputs(erase_key, k, q)
  present = sum(x is not None for x in keys)
  # The inverse works in the memory of queries and keys, when these are dead, and some more.
  num_more = max(1, NUM_TILES - present * (K // C))
  scratch = _SystemBuffers(
    keys=_SystemInputs(*(None if x is None else smem_tile(C, K) for x in keys)),
    tables=plgpu.SMEM((NUM_ROWS, C), jnp.float32),
    blocks=diagonal_blocks(),
    scores=smem_tile(C, C),
    more=[smem_tile(C, C) for _ in range(num_more)],
    arrived_barrier=plgpu.Barrier(num_barriers=present + 1),
  )

  def body(at, gmem: _SystemArrays, outs: ChunkSystems, smem: _SystemBuffers):
    ordered = lambda x: [ref for ref in (x.q, x.k, x.erase_key) if ref is not None]
    tiles = ordered(smem.keys)
    copies = [
      (source.at[at.batch, at.tokens, shared_head(at.head, H, source)], target)
      for source, target in zip(ordered(gmem.keys), tiles, strict=True)
    ]
    copies.append((gmem.tables.at[at.batch, at.head, at.chunk], smem.tables))
    load_inputs(copies, smem.arrived_barrier)
    q_smem, k_smem = smem.keys.q, smem.keys.k
    erase_smem = k_smem if erase_key is None else smem.keys.erase_key
    gram, scores = backend.dots(
      Dots([(erase_smem, transpose_ref(k_smem))]), Dots([(q_smem, transpose_ref(k_smem))])
    )
    mask = gmem.documents.mask(at, causal_mask(C))
    weight = jnp.where(mask, decay_between_tokens(smem.tables.at[CUMULATIVE]), 0.0)
    smem.scores[...] = (scores * weight).astype(jnp.bfloat16)
    weight = jnp.where(causal_mask(C, strict=True), weight, 0.0)
    lower = gram * weight * broadcast_rows(load_row_vector(smem.tables.at[RATE]), (C, C))
    # q, k and the erase key are dead: their last products are done.
    blocks = [x.at[:, pl.ds(start, C)] for x in tiles for start in range(0, K, C)]
    free = [*blocks[: NUM_TILES - 1], *smem.more]
    inverse = triangular_inverse(lower, smem.blocks, free, backend)
    inverse_smem = smem.more[-1]  # a whole tile, where copies begin; dead, as all of `free`
    inverse_smem[...] = inverse.astype(jnp.bfloat16)
    store_outputs(
      [
        (inverse_smem, outs.inverse.at[at.batch, at.head, at.tokens]),
        (smem.scores, outs.scores.at[at.batch, at.head, at.tokens]),
      ]
    )

  result = jax.ShapeDtypeStruct((B, H, T, C), jnp.bfloat16)
  return launch_per_chunk(
    body,
    _SystemArrays(keys, tables, documents.mask_only),
    ChunkSystems(result, result),
    scratch,
    sizes=(1, T // C, H, B),
    chunk=C,
    name="delta_rule_chunk_systems",
    backend=backend,
  )

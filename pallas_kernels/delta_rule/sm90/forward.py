"""Forward pass of the delta rule over chunks.

First `chunk_inverses`, all chunks at once: the inverse of each chunk's triangular system; with
decays per key channel `channel_chunks`, which also decays queries and keys. Then
`recurrence.forward_recurrence` carries the state along the chunks and computes the outputs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries
from pallas_kernels.core.chunk_grid import (
  launch_per_chunk,
  shared_head,
  store_outputs,
)
from pallas_kernels.core.decay_tables import (
  chunk_decays,
  load_number,
  padded_numbers,
)
from pallas_kernels.core.index import ChunkIndex
from pallas_kernels.core.wgmma import (
  WITHOUT_BARRIERS,
  Backend,
  Ref,
  broadcast_cols,
  broadcast_rows,
  causal_mask,
  load_col_vector,
  load_row_vector,
  smem_tile,
  transpose_ref,
  with_int32_indices,
)
from pallas_kernels.delta_rule.sm90 import channel_chunks
from pallas_kernels.delta_rule.sm90.recurrence import Stage, forward_recurrence, split_maps
from pallas_kernels.delta_rule.sm90.splits import entering_states
from pallas_kernels.delta_rule.triangular_inverse import (
  InverseTiles,
  diagonal_blocks,
  lhs_scratch,
  triangular_inverse,
)
from pallas_kernels.delta_rule.types import (
  AFTER,
  BEFORE,
  CUMULATIVE,
  DECAY,
  NUM_ROWS,
  RATE,
  Inputs,
  Options,
  Residuals,
  rate_tables,
)


def forward(
  options: Options, inputs: Inputs, segments: jax.Array | None, *, for_gradient: bool
) -> tuple[tuple[jax.Array, jax.Array], Residuals | None]:
  """The results of `op.delta_rule`, and what the backward pass needs of this one."""
  q, k, erase_key, v, beta, log_decay, kv, write_key = inputs
  config = options.config
  documents = DocumentBoundaries.of(segments)
  chunks = None
  if inputs.channels:
    tables = rate_tables(config.chunk, q.shape[1], beta)
    chunks = channel_chunks.decayed_chunks(
      channel_chunks.ChunkInputs(q, k, erase_key, log_decay, tables, documents, write_key),
      heads=inputs.heads,
      erase_before_decay=options.erase_before_decay,
      chunk=config.chunk,
      backend=options.backend,
    )
    stage, inverse = channel_chunks.decayed_stage(chunks, v, tables), chunks.inverse
  else:
    more = functools.partial(padded_numbers, tokens=q.shape[1])
    inverse, tables = chunk_inverses(
      ChunkInputs(k, erase_key, more(beta), more(log_decay), documents),
      heads=beta.shape[2],
      chunk=config.chunk,
      backend=options.backend,
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
    residuals = Residuals(inverse, tables, results.corrections, results.states, maps, chunks)
  return (results.out, transposed(results.last_state[:, :, -1])), residuals


def transposed(state: Any) -> Any:
  """[..., V, K] of [..., K, V], or the other way round."""
  return None if state is None else state.swapaxes(-1, -2)


class ChunkInputs(NamedTuple):
  """Arguments of `chunk_inverses`, or their GMEM references."""

  k: Any  # [B, T, H or fewer, K] bfloat16, T a multiple of the chunk
  erase_key: Any  # [B, T, H or fewer, K] bfloat16, or None for k
  beta: Any  # of `padded_numbers`
  log_decay: Any  # the same
  documents: DocumentBoundaries


class ChunkOutputs(NamedTuple):
  """Results of `chunk_inverses`, or their GMEM references."""

  inverse: Any  # [B, H, T, C] bfloat16
  tables: Any  # [B, H, N, NUM_ROWS, C] float32


class _Buffers(NamedTuple):
  tiles: Any  # keys [C, K]: k and, if it is another, the erase key; when dead, `InverseTiles`
  tables: Any  # [NUM_ROWS, C] float32
  blocks: Any  # of `triangular_inverse`
  lhs: Any  # the same
  out: Any  # [C, C]
  arrived_barrier: Any  # of keys


@with_int32_indices
def chunk_inverses(
  inputs: ChunkInputs, *, heads: int, chunk: int, backend: Backend
) -> ChunkOutputs:
  """The inverse of each chunk's triangular system, which needs no state, and its table.

  With L_ij = (e_i . k_j) decay_ij for j < i it is (I + diag(beta) L)^-1.
  """
  (B, T, _, K), H, C = inputs.k.shape, heads, chunk
  present = 1 if inputs.erase_key is None else 2
  scratch = _Buffers(
    tiles=plgpu.RefUnion([smem_tile(C, K)] * present, InverseTiles.of()),
    tables=plgpu.SMEM((NUM_ROWS, C), jnp.float32),
    blocks=diagonal_blocks(),
    lhs=lhs_scratch(backend),
    out=smem_tile(C, C),
    arrived_barrier=plgpu.Barrier(num_barriers=present),
  )

  def body(at, gmem: ChunkInputs, outs: ChunkOutputs, smem: _Buffers):
    keys, tiles = smem.tiles
    for number, (source, target) in enumerate(zip([gmem.k, gmem.erase_key], keys, strict=False)):
      source = source.at[at.batch, at.tokens, shared_head(at.head, H, source)]
      plgpu.copy_gmem_to_smem(source, target, smem.arrived_barrier.at[number])
    states = gmem.documents.load_states(at)
    _fill_table(smem.tables, at, gmem, backend)
    plgpu.commit_smem()
    of_chunk = outs.tables.at[at.batch, at.head, at.chunk]
    plgpu.copy_smem_to_gmem(smem.tables, of_chunk)
    rate = broadcast_rows(load_row_vector(smem.tables.at[RATE]), (C, C))
    cumulative = smem.tables.at[CUMULATIVE]
    # `decay_between_tokens` without its bound: what that would change is masked.
    lag = broadcast_rows(load_row_vector(cumulative), (C, C)) - broadcast_cols(
      load_col_vector(cumulative), (C, C)
    )
    weight = jnp.where(causal_mask(C, strict=True), jnp.exp(lag) * rate, 0.0)
    for number in range(present):
      plgpu.barrier_wait(smem.arrived_barrier.at[number])
    lower = backend.dot(keys[-1], transpose_ref(keys[0])) * weight
    lower = gmem.documents.mask_scores(at, lower, states)
    inverse = triangular_inverse(lower, smem.blocks, tiles, smem.lhs, backend)
    smem.out[...] = inverse.astype(jnp.bfloat16)
    store_outputs([(smem.out, outs.inverse.at[at.batch, at.head, at.tokens])])

  return launch_per_chunk(
    body,
    inputs,
    ChunkOutputs(
      jax.ShapeDtypeStruct((B, H, T, C), jnp.bfloat16),
      jax.ShapeDtypeStruct((B, H, T // C, NUM_ROWS, C), jnp.float32),
    ),
    scratch,
    sizes=(1, T // C, H, B),
    chunk=C,
    name="delta_rule_chunk_inverses",
    backend=backend,
    compiler_params=WITHOUT_BARRIERS,
  )


def _fill_table(table_smem: Ref, at: ChunkIndex, gmem: ChunkInputs, backend: Backend) -> None:
  """Computes the rows of a chunk's table, while its keys are being copied."""
  log_decay, rate = (load_number(x, at) for x in (gmem.log_decay, gmem.beta))
  table_smem.at[CUMULATIVE][...] = log_decay
  backend.barrier()
  log_decay = load_col_vector(table_smem.at[CUMULATIVE])
  backend.barrier()  # all have read it
  decays = chunk_decays(log_decay, at, gmem.documents)
  rows = {BEFORE: decays.before, AFTER: decays.after, RATE: rate}
  rows |= {DECAY: decays.total, CUMULATIVE: decays.cumulative}
  for number, row in rows.items():
    table_smem.at[number][...] = row

"""Forward pass of linear attention over chunks.

Two paths, by the decay. One decay for all key channels of a head (scalar): the output kernel
computes the scores of each chunk in its prologue. One per key channel: `intra_chunk.chunk_scores`
computes them first, for all chunks at once. Then the output kernel carries the state along the
chunks (`state_pipeline`): scores times values, plus queries times the entering state.

A long sequence is cut into splits that run at the same time: a first pass computes what each split
adds to the state, a small scan over the splits their initial states.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.core.boundaries import DocumentBoundaries
from pallas_kernels.core.chunk_grid import (
  Tiles,
  decay_of_sums,
  with_own_weight,
)
from pallas_kernels.core.decay_tables import (
  ScalarDecayTables,
  padded_numbers,
  scalar_decay_tables,
  token_decay_tables,
)
from pallas_kernels.core.wgmma import (
  TILE_WIDTH,
  Dots,
  broadcast_cols,
  broadcast_rows,
  causal_mask,
  load_col_vector,
  load_row_vector,
  load_tile,
  store_unoptimized,
  transpose_ref,
)
from pallas_kernels.linear_attention.sm90 import intra_chunk
from pallas_kernels.linear_attention.sm90.intra_chunk import ScoreInputs, ScoreOutputs, chunk_scores
from pallas_kernels.linear_attention.sm90.splits import initial_states_of_splits, normalizer_of
from pallas_kernels.linear_attention.sm90.state_pipeline import (
  ChunkDecay,
  ChunkPrologue,
  ConstantDecay,
  Normalizer,
  Operands,
  Sizes,
  StateOutputs,
  Work,
  constant_decay,
  decay_tile,
  run_state_pipeline,
)
from pallas_kernels.linear_attention.types import (
  Inputs,
  Options,
  Residuals,
  has_channel_decay,
)


def forward(
  options: Options, inputs: Inputs, segments: jax.Array | None, *, for_gradient: bool
) -> tuple[Any, Residuals | None]:
  """The results of `op.linear_attention`, and what the backward pass needs of this one."""
  q, k, v, log_decay, bonus, kv, key_sum, own_weight = inputs
  normalize, config = options.normalize, options.config
  C, T = config.chunk, q.shape[1]
  documents = DocumentBoundaries.of(segments)
  in_chunk, weight, tables = ScoreOutputs(*[None] * 5), None, None
  if has_channel_decay(log_decay):
    constant = constant_decay(options, inputs, documents)
    in_chunk = chunk_scores(
      ScoreInputs(q, k, log_decay, bonus, documents),
      heads=inputs.heads,
      length=options.length,
      decayed_q=constant is None,
      decayed_k=constant is None or (for_gradient and config.separate_values),
      sums=normalize,
      config=config.scores,
      chunk=C,
      backend=options.backend,
    )
    total = in_chunk.decay
    q_state, k_state = (q, k) if constant is not None else (in_chunk.q, in_chunk.k)
    decay = constant if constant is not None else ChunkDecay(total, q.shape[-1])
    outputs: Callable[..., StateOutputs] = functools.partial(
      channel_decay_outputs, q_state, k_state, v, in_chunk.scores, in_chunk.score_sum
    )
  else:
    tables = _tables(options, log_decay, documents, T)
    weight, total, k_state = tables.after, tables.total, k
    decay = ChunkDecay(total, q.shape[-1])
    outputs = functools.partial(scalar_decay_outputs, q, k, v, tables, documents, own_weight)
  normalizer = normalizer_of(options, inputs, key_sum, weight)
  initial, normalizer = initial_states_of_splits(
    k_state, v, weight, decay, kv, normalizer, options, heads=inputs.heads, reverse=False
  )
  # Without weights: keys have been decayed in SMEM.
  normalizer = None if normalizer is None else normalizer._replace(weights=None)
  results = outputs(
    decay, initial, normalizer, options, heads=inputs.heads, store_states=for_gradient
  )
  last_key_sum = results.last_key_sum[:, :, -1] if normalize else None
  result = results.out, results.last_state[:, :, -1], last_key_sum
  if not for_gradient:
    return result, None
  residuals = Residuals(
    states=results.states,
    decay=total,
    tables=tables,
    key_sums=results.key_sums,
    out=results.out if normalize else None,
    denominator=results.denominator,
    scores=in_chunk.scores,
    q=in_chunk.q,
    k=in_chunk.k,
  )
  return result, residuals


def _tables(options: Options, log_decay, documents, padded: int) -> ScalarDecayTables:
  """The tables of decays that all key channels of a head share."""
  chunk = options.config.chunk
  if log_decay.shape[1] == 1:
    sizes = {"length": options.length, "padded": padded, "chunk": chunk}
    return scalar_decay_tables(log_decay, documents, **sizes)
  return token_decay_tables(
    padded_numbers(log_decay, tokens=padded),
    documents,
    heads=log_decay.shape[2],
    chunk=chunk,
    backend=options.backend,
  )


class _OutputTiles(NamedTuple):
  """The stage of a chunk."""

  k: Any  # [C, K]
  q: Any  # [C, K]
  scores: Any  # [C, C]
  v: Any  # [C, 64] for each consumer
  denominator: Any = None  # [C] float32


class _DecayInPrologue(NamedTuple):
  """How the prologue decays a chunk's queries and keys."""

  begin: Callable  # (at, cta) -> what does not change
  fetch: Callable  # (at, cta) -> the `StateDocuments` of a chunk or None, and its vectors
  # (fixed, vectors, at, tiles_smem, cta, wait) -> [C], the sums of rows of scores, or None
  step: Callable


class _ScalarVectors(NamedTuple):
  cumulative: Any
  before: Any
  after: Any
  documents: DocumentBoundaries
  own_weight: Any  # [B, H, T] or None


def scalar_decay_outputs(
  q: jax.Array,  # [B, T, H or fewer, K] bfloat16, T a multiple of the chunk
  k: jax.Array,  # [B, T, H or fewer, K] bfloat16
  v: jax.Array,  # [B, T, H or fewer, V] bfloat16
  tables: ScalarDecayTables,
  documents: DocumentBoundaries,
  own_weight: jax.Array | None,  # [B, T, H] float32
  decay: ChunkDecay | ConstantDecay,  # a `ChunkDecay`
  initial: jax.Array | None,  # [B, H, P, K, V] float32
  normalizer: Normalizer | None,
  options: Options,
  *,
  heads: int,
  store_states: bool,
) -> StateOutputs:
  """Outputs for one decay for all key channels; the prologue computes the scores."""
  backend, C, rank = options.backend, options.config.chunk, options.rank
  cumulative = tables.cumulative
  chunks_alike = cumulative.shape[2] == C and cumulative.shape[0] == 1

  def load_tables(at, gmem):
    cumulative = at.table_row(gmem.cumulative)
    ends = (load_row_vector(at.table_row(table)) for table in (gmem.before, gmem.after))
    return load_row_vector(cumulative), load_col_vector(cumulative), *ends

  def factors(rows, cols, before, after):
    return decay_of_sums(rows, cols), before, after

  def fetch(at, cta):
    gmem = cta.vectors_gmem
    return None, (gmem.documents.load_ids(at), () if chunks_alike else load_tables(at, gmem))

  def step(fixed, fetched, at, tiles, cta, wait):
    gmem, (ids, tables) = cta.vectors_gmem, fetched
    between, before, after = fixed if chunks_alike else factors(*tables)
    mask = causal_mask(C, rank=rank)
    mask = mask if ids is None else mask & ids.same_document()
    if gmem.own_weight is not None:
      own = gmem.own_weight.at[at.batch, at.head, at.tokens]
      between = with_own_weight(between, own, rank)
    wait()
    scores = backend.dot(tiles.q, transpose_ref(tiles.k))
    scores = jnp.where(mask, scores * between, 0.0)
    tiles.scores[...] = scores.astype(jnp.bfloat16)
    for x_smem, rows in ((tiles.q, before), (tiles.k, after)):
      x_smem[...] = (load_tile(x_smem) * broadcast_rows(rows, x_smem.shape)).astype(jnp.bfloat16)
    return None if normalizer is None else jnp.sum(scores, axis=1)

  def begin(at, cta):
    return factors(*load_tables(at, cta.vectors_gmem)) if chunks_alike else None

  scores, specs = jax.ShapeDtypeStruct((C, C), jnp.bfloat16), Tiles(C, heads)
  tiles = _OutputTiles(specs.tokens(k), specs.tokens(q), scores, specs.token_block(v))
  own_weight = None if own_weight is None else own_weight.swapaxes(1, 2)
  end = tables.before, tables.after
  vectors = _ScalarVectors(cumulative, *end, documents.mask_only, own_weight)
  return _outputs(
    Operands(tiles, vectors, decay, normalizer, initial),
    _DecayInPrologue(begin, fetch, step),
    options,
    heads=heads,
    store_states=store_states,
  )


def channel_decay_outputs(
  # bfloat16, of H heads or fewer; with a `ChunkDecay` q is decayed from the chunk's start, k to its
  # end.
  q: jax.Array,  # [B, T, H, K]
  k: jax.Array,  # [B, T, H, K]
  v: jax.Array,  # [B, T, H, V]
  scores: jax.Array,  # [B, H, T, C] bfloat16
  score_sum: jax.Array | None,  # [B, H, T] float32, the sum of each row of scores
  decay: ChunkDecay | ConstantDecay,
  initial: jax.Array | None,  # [B, H, P, K, V] float32
  normalizer: Normalizer | None,
  options: Options,
  *,
  heads: int,
  store_states: bool,
) -> StateOutputs:
  """Outputs for decays per key channel, whose scores are computed already."""
  constant = decay if isinstance(decay, ConstantDecay) else None

  def begin(at, cta):
    if constant is None:
      return None
    kinds = intra_chunk.BEFORE, intra_chunk.AFTER
    return tuple(constant.factors(which, at, cta.decay_gmem) for which in kinds)

  def fetch(at, cta):
    total = None
    if normalizer is not None:
      total = load_row_vector(cta.vectors_gmem.at[at.batch, at.head, at.tokens])
    states = cta.decay_gmem.documents.load_states(at)
    return states, (states, total)

  def step(fixed, states_and_total, at, tiles, cta, wait):
    states, total = states_and_total
    decayed: Any = []
    if constant is not None:
      q_decay = constant.in_chunk(intra_chunk.BEFORE, fixed[0], at, cta.decay_gmem, states)
      k_decay = constant.in_chunk(intra_chunk.AFTER, fixed[1], at, cta.decay_gmem, states)
      decayed = [(tiles.q, q_decay), (tiles.k, k_decay)]
    wait()
    for tile_smem, arguments in decayed:
      decay_tile(tile_smem, *arguments)
    return total

  idle, specs = constant is None and normalizer is None, Tiles(options.config.chunk, heads)
  tiles = _OutputTiles(specs.tokens(k), specs.tokens(q), specs.scores(scores), specs.token_block(v))
  return _outputs(
    Operands(tiles, score_sum, decay, normalizer, initial),
    None if idle else _DecayInPrologue(begin, fetch, step),
    options,
    heads=heads,
    store_states=store_states,
  )


def _outputs(
  operands: Operands,
  decaying: Any,  # `_DecayInPrologue`, or None if there is nothing to do and no normalizer
  options: Options,
  *,
  heads: int,
  store_states: bool,
) -> StateOutputs:
  """The output kernel: `StateOutputs` without `overlap`."""
  backend, C, config = options.backend, options.config.chunk, options.config.outputs
  tiles, normalizer, scale = operands.tiles, operands.normalizer, options.scale
  (B, T, _, V), H, K = tiles.v.array.shape, heads, tiles.q.array.shape[-1]
  ctas = V // config.value_tile
  out_type = StateOutputs()
  if normalizer is not None:
    # One row for each tile of values, so that no two CTAs write the same numbers.
    out_type = normalizer.out_type(ctas, T // C if store_states else 0)
    denominator = jax.ShapeDtypeStruct((ctas, B, H, T), jnp.float32)
    out_type = out_type._replace(denominator=denominator)
    tiles = tiles._replace(denominator=jax.ShapeDtypeStruct((C,), jnp.float32))
  out_type = out_type._replace(out=jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16))

  def step(fixed, fetched, total_decay, at, tiles, cta, wait):
    states, vectors = fetched
    if normalizer is None:
      decaying.step(fixed, vectors, at, tiles, cta, wait)
      return None
    smem, outs = cta.normalizer_smem, cta.outs_gmem
    decay_of_chunk = total_decay(at, states)
    if store_states:
      normalizer.store(smem, outs.key_sums.at[cta.number(at), at.batch, at.head, at.chunk])
    denominator = decaying.step(fixed, vectors, at, tiles, cta, wait)
    for start in range(0, K, TILE_WIDTH):  # by 64 channels, for want of registers
      channels = pl.ds(start, TILE_WIDTH)
      queries = load_tile(tiles.q.at[:, channels])
      entering = broadcast_cols(load_col_vector(smem.key_sum.at[channels]), queries.shape)
      denominator = denominator + jnp.sum(queries * entering, axis=1)
    tiles.denominator[...] = denominator
    target = outs.denominator.at[cta.number(at), at.batch, at.head, at.tokens]
    store_unoptimized(target, denominator)
    return lambda: normalizer.advance(smem, tiles.k, decay_of_chunk, backend)

  def consume(at, tiles, state_smem, cta, state, decayed):
    """Mainloop and epilogue of a chunk: 64 columns of the output and of the next state."""
    del at, cta, state
    out, state = backend.dots(
      Dots([(tiles.scores, tiles.v), (tiles.q, state_smem)]),
      Dots([(transpose_ref(tiles.k), tiles.v)], start=decayed),
    )
    if normalizer is not None:
      out = out / broadcast_rows(load_row_vector(tiles.denominator), out.shape)
    return state, out * scale if scale != 1.0 else out

  prologue = None if decaying is None else ChunkPrologue(decaying.begin, decaying.fetch, step)
  results = run_state_pipeline(
    operands._replace(tiles=tiles),
    Work(consume, prologue, out_type, store_states),
    Sizes(B, T, H, K, V, options.num_splits),
    name="linear_attention_outputs",
    config=config,
    chunk=C,
    backend=backend,
  )
  return results.of_first_cta()

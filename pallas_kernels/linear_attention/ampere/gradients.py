"""Gradients inside each chunk: one CTA per chunk and 64 channels.

With G the cotangent of S^T q (and d that of the denominator, with a normalizer), S and z the state
and the key sum that enter a chunk, A and y the cotangents of those that leave it:

    dP_ij = G_i . v_j + d_i                                              i >= j
    dq_i  = before_i (S G_i + d_i z) + sum_j weight_ij dP_ij k_j
    dk_j  = after_j (A v_j + y)      + sum_i weight_ij dP_ij q_i
    dv_j  = A^T (after_j k_j)        + sum_i scores_ij G_i

For decays per key channel the sums over pairs are those of the merges (`decays.py`), whose factors
queries and keys share; a log decay's gradient collects, at each factor, the factor times its
cotangent. Nothing is a difference of large numbers.

The erase keys of the delta rule are queries that read all tokens but their own (i > j): of them
everything but the terms with A, which belong to the queries.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries, select_rows
from pallas_kernels.core.chunk_grid import (
  broadcast_diagonal,
  decay_between_tokens,
  launch_per_chunk,
  own_token,
  shared_head,
  with_own_weight,
)
from pallas_kernels.core.mma import Mma, blocks_of, load_tiles, store_tile
from pallas_kernels.core.wgmma import (
  TILE_WIDTH,
  Dots,
  broadcast_cols,
  broadcast_rows,
  causal_mask,
  load_col_vector,
  load_row_vector,
  load_tile,
  smem_tile,
  store_unoptimized,
  transpose_ref,
  with_int32_indices,
  zero_accumulator,
)
from pallas_kernels.linear_attention.ampere.decays import (
  AFTER,
  BEFORE,
  LARGEST_LOG2,
  LARGEST_LOG2_OF_GRADIENTS,
  MERGES,
  ConstantDecay,
  DecayBuffers,
  decay_of_block,
  meet_at_start,
  merged_pairs,
  subchunk_pairs,
)

C = TILE_WIDTH  # tokens of a chunk


class GradientInputs(NamedTuple):
  """Arrays of `query_key_gradients`, or GMEM references. Groups of heads may share q, k, v."""

  q: Any  # [B, T, H, K] bfloat16
  k: Any  # [B, T, H, K] bfloat16
  v: Any  # [B, T, H, V] bfloat16
  d_out: Any  # [B, T, H, V] bfloat16: G
  states: Any  # [B, H, N, K, V] bfloat16: S; None where other keys' gradients have its terms
  adjoints: Any  # [B, H, N, K, V] bfloat16: A; None for erase keys
  documents: DocumentBoundaries
  d_denominator: Any = None  # [B, H, T] float32: d; None without the normalizer, as the next two
  key_sums: Any = None  # [B, H, N, K] float32: z
  d_key_sums: Any = None  # [B, H, N, K] float32: y
  log_decay: Any = None  # channel decays: [H, K] or [B, T, H, K] float32
  total: Any = None  # decays per token: [B, H, N, K] float32, over each chunk
  bonus: Any = None  # [H, K] float32 or None
  cumulative: Any = None  # scalar decays: of `ScalarDecayTables`, as the next two
  before: Any = None
  after: Any = None
  own_weight: Any = None  # [B, H, T] float32, with scalar decays: of a token in its own output


class GradientOutputs(NamedTuple):
  """Results of `query_key_gradients`, or their GMEM references; None for those not asked for."""

  q: Any  # [B, T, H, K] bfloat16
  k: Any  # [B, T, H, K] bfloat16
  # [B, H, N, K] float32: the cotangent of the decay over the chunk; None without one of the states.
  d_total: Any = None
  log_decay: Any = None  # channel decays: [B, T, H, K], or [B, H, N, K] for constant ones, float32
  bonus: Any = None  # [B, H, N, K] float32
  # Scalar decays: [B, H, K / 64, T] float32, of the tables; of `cumulative`: later - earlier.
  later: Any = None
  earlier: Any = None
  before: Any = None
  after: Any = None
  own_weight: Any = None


class _Buffers(NamedTuple):
  """SMEM, each [C, 64] unless stated."""

  q: Any
  k: Any
  d_out: Any
  v: Any
  state: Any
  d_scores: Any  # [C, C]
  vector: Any  # [64] float32
  decay: DecayBuffers


class _Cotangents(NamedTuple):
  """Cotangents that the chunk's values give, in registers."""

  d_scores: jax.Array  # [C, C]: dP, of pairs of one document
  before: Any  # [C, 64]: S G_i + d_i z; None without states
  after: Any  # [C, 64]: A v_j + y; None for erase keys
  total: Any  # [64]: per column, the cotangent of the decay over the chunk; None unless asked for

  @property
  def strict(self) -> bool:
    """Whether no token reads itself."""
    return self.after is None


def _from_values(at, channels, gmem: GradientInputs, smem: _Buffers, decays, heads, backend):
  """`_Cotangents`: sums over the columns of values, 64 at a time."""
  part = lambda x, columns: x.at[at.batch, at.tokens, shared_head(at.head, heads, x), columns]
  of_state = lambda x, columns: x.at[at.batch, at.head, at.chunk, channels, columns]
  has_states, d_scores = gmem.states is not None, zero_accumulator(C, C)
  before: Any = zero_accumulator(C, C) if has_states else None
  after: Any = None if gmem.adjoints is None else zero_accumulator(C, C)
  overlap: Any = None
  for columns in blocks_of(gmem.v.shape[-1]):
    copies = [(part(gmem.d_out, columns), smem.d_out), (part(gmem.v, columns), smem.v)]
    load_tiles(*copies, *([(of_state(gmem.states, columns), smem.state)] if has_states else []))
    d_scores = backend.dot(smem.d_out, transpose_ref(smem.v), start=d_scores)
    if has_states:
      before = backend.dot(smem.d_out, transpose_ref(smem.state), start=before)
    if gmem.adjoints is None:
      continue
    entering = load_tile(smem.state) if decays and has_states else None
    load_tiles((of_state(gmem.adjoints, columns), smem.state))
    after = backend.dot(smem.v, transpose_ref(smem.state), start=after)
    if entering is not None:
      added = jnp.sum(entering * load_tile(smem.state), axis=1)
      overlap = added if overlap is None else overlap + added
  total: Any = None
  if overlap is not None:  # from a number per row to one per column
    smem.vector[...] = overlap
    total = load_col_vector(smem.vector)
  if gmem.d_denominator is not None:
    rows = load_row_vector(gmem.d_denominator.at[at.batch, at.head, at.tokens])
    of_chunk = lambda x: load_col_vector(x.at[at.batch, at.head, at.chunk, channels])
    z, y = of_chunk(gmem.key_sums), of_chunk(gmem.d_key_sums)
    d_scores = d_scores + broadcast_rows(rows, (C, C))
    before = before + broadcast_rows(rows, (C, C)) * broadcast_cols(z, (C, C))
    after = after + broadcast_cols(y, (C, C))
    total = total + z * y if decays else None
  return _Cotangents(gmem.documents.mask_scores(at, d_scores), before, after, total)


def _scalar_decay(
  at, gmem: GradientInputs, outs, smem: _Buffers, cot: _Cotangents, decays, rank, backend
):
  """(dq, dk) of 64 channels, [C, 64], for one decay for all channels; stores the tables' parts."""
  row = lambda table: broadcast_rows(load_row_vector(at.table_row(table)), (C, C))
  store = lambda target, x: store_unoptimized(target.at[at.batch, at.head, at.block, at.tokens], x)
  between = decay_between_tokens(at.table_row(gmem.cumulative))
  own = gmem.own_weight is not None
  if own:
    own_weight = gmem.own_weight.at[at.batch, at.head, at.tokens]
    between = with_own_weight(between, own_weight, rank)
  mask = causal_mask(C, strict=cot.strict, rank=rank)
  weighted = jnp.where(mask, cot.d_scores * between, 0.0)
  scores: Any = None
  if decays or own:
    scores = backend.dot(smem.q, transpose_ref(smem.k))
  if own:
    of_own = jnp.where(own_token((C, C), rank), scores * cot.d_scores, 0.0)
    store(outs.own_weight, jnp.sum(of_own, axis=1))
  if decays:
    crossing = jnp.where(causal_mask(C, strict=True, rank=rank), scores * weighted, 0.0)
    store(outs.later, jnp.sum(crossing, axis=1))
    store(outs.earlier, jnp.sum(crossing, axis=0))
    store(outs.before, jnp.sum(load_tile(smem.q) * cot.before, axis=1))
    if not cot.strict:
      store(outs.after, jnp.sum(load_tile(smem.k) * cot.after, axis=1))
  pairs_smem = backend.to_lhs(weighted, smem.d_scores)
  d_q = backend.dot(pairs_smem, smem.k, start=cot.before * row(gmem.before))
  start = None if cot.strict else cot.after * row(gmem.after)
  return d_q, backend.dot(transpose_ref(pairs_smem), smem.q, start=start)


def _channel_decay(
  at, channels, decay, gmem: GradientInputs, outs, smem: _Buffers, cot: _Cotangents, decays, backend
):
  """(dq, dk) of 64 channels, [C, 64], for decays per key channel; stores the decays' gradient."""
  queries, keys = (lambda: load_tile(smem.q)), (lambda: load_tile(smem.k))
  # Values, cotangents and states are dead: these are in registers.
  left_smem, right_smem, pairs_smem = smem.d_out, smem.v, smem.state
  smem.d_scores[...] = cot.d_scores.astype(jnp.bfloat16)
  acc: Any = None
  if decays:
    acc = zero_accumulator(C, C)
    if not isinstance(decay, ConstantDecay) and cot.total is not None:
      whole = load_col_vector(gmem.total.at[at.batch, at.head, at.chunk, channels]) * cot.total
      acc = acc + broadcast_cols(whole, (C, C))

  constant = isinstance(decay, ConstantDecay)
  limit = LARGEST_LOG2_OF_GRADIENTS if decays else LARGEST_LOG2
  before = decay.exponent(BEFORE)
  if constant:
    first_merge = decay.level(smem.vector)
    one_product: Any = jnp.minimum(first_merge, 1)
  else:
    one_document = gmem.documents._replace(segment_ids=None)  # pairs of others are masked
    _, all_meet = meet_at_start(before, limit, at, one_document, smem.vector)
    first_merge, one_product = jnp.where(all_meet, MERGES, 0), jnp.where(all_meet, 1, 0)
  d_q = zero_accumulator(C, C)
  if cot.before is not None:
    d_q = select_rows(gmem.documents.sees_entering_state(at), cot.before * jnp.exp2(before))
    if decays:
      acc = decay.gradient(acc, queries() * d_q, BEFORE, left_smem)
  d_k = zero_accumulator(C, C)
  if not cot.strict:
    rows = gmem.documents.reaches_leaving_state(at)
    d_k = select_rows(rows, cot.after * decay.factor(AFTER))
    if decays:
      acc = decay.gradient(acc, keys() * d_k, AFTER, left_smem)
    same = broadcast_diagonal(cot.d_scores, (C, C))
    if gmem.bonus is not None:
      d_bonus = jnp.sum(same * queries() * keys(), axis=0)
      store_unoptimized(outs.bonus.at[at.batch, at.head, at.chunk, channels], d_bonus)
      weight = load_col_vector(gmem.bonus.at[at.head, channels])
      same = same * broadcast_cols(weight, (C, C))
    d_q, d_k = d_q + same * keys(), d_k + same * queries()

  def through(mask, left_factor, right_factor):
    """The cotangents of queries and keys through a product of both times these factors."""
    left = backend.to_lhs(queries() * left_factor, left_smem)
    right = backend.to_lhs(keys() * right_factor, right_smem)
    pairs = backend.to_lhs(jnp.where(mask, load_tile(smem.d_scores), 0.0), pairs_smem)
    d_left = backend.dot(pairs, right) * left_factor
    return d_left, backend.dot(transpose_ref(pairs), left) * right_factor

  def in_subchunks(_, carry):
    d_q, d_k, acc = carry
    if constant:
      inside = subchunk_pairs(first_merge)
      of_queries, of_keys = decay.in_subchunk(first_merge)
    else:
      inside = causal_mask(C, strict=True)
      before, keys_log2 = decay.from_start()
      of_queries, of_keys = jnp.exp2(before), jnp.exp2(jnp.minimum(-keys_log2, limit))
    d_left, d_right = through(inside, of_queries, of_keys)
    if decays and constant:
      weighted = jnp.where(inside, load_tile(smem.d_scores) * decay.lags(), 0.0)
      d_lags = backend.dot(backend.to_lhs(weighted, pairs_smem), right_smem)
      acc = acc + d_lags * of_queries * queries()
    elif decays:
      later = queries() * d_left - keys() * d_right
      acc = decay.gradient(acc, later, BEFORE, left_smem)
      if gmem.bonus is not None:  # a key's sum has its own token, too
        acc = acc - keys() * d_right
    return d_q + d_left, d_k + d_right, acc

  def merge(level, carry):
    d_q, d_k, acc = carry
    size = 1 << level
    factor = decay.factor(size)
    d_left, d_right = through(merged_pairs(size), factor, factor)
    if decays:
      acc = decay.gradient(acc, queries() * d_left + keys() * d_right, size, left_smem)
    return d_q + d_left, d_k + d_right, acc

  # Loops of 0 or 1: see `pallas_kernels/README.md` about `lax.cond`.
  carry = lax.fori_loop(0, one_product, in_subchunks, (d_q, d_k, acc))
  d_q, d_k, acc = lax.fori_loop(first_merge, MERGES, merge, carry)
  if decays and constant:
    target = outs.log_decay.at[at.batch, at.head, at.chunk, channels]
    store_unoptimized(target, jnp.sum(acc, axis=0))
  elif decays:
    store_unoptimized(outs.log_decay.at[at.batch, at.tokens, at.head, channels], acc)
  return d_q, d_k


@with_int32_indices
def query_key_gradients(
  inputs: GradientInputs,
  *,
  heads: int,
  length: int,  # tokens before padding
  scale: float,  # of dq and dk
  decays: bool,  # whether the decay wants a gradient
  rank: int = 1,  # rows of a token, with scalar decays
  backend: Mma,
) -> GradientOutputs:
  """dq, dk and, if `decays`, the parts of the decays' gradient, without `scale`."""
  (B, T, _, K), H, log_decay = inputs.q.shape, heads, inputs.log_decay
  N, scalar = T // C, log_decay is None
  array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
  per_token, per_chunk, table = (
    array(jnp.float32, *x) for x in ((B, T, H, K), (B, H, N, K), (B, H, K // TILE_WIDTH, T))
  )
  outputs = GradientOutputs(*(array(jnp.bfloat16, B, T, H, K) for _ in range(2)))
  strict = inputs.adjoints is None
  if decays:
    both = inputs.states is not None and not strict
    outputs = outputs._replace(d_total=per_chunk if both else None)
    if scalar:
      outputs = outputs._replace(later=table, earlier=table, before=table)
      outputs = outputs._replace(after=None if strict else table)
    else:
      outputs = outputs._replace(log_decay=per_token if log_decay.ndim == 4 else per_chunk)
  if inputs.bonus is not None and not strict:
    outputs = outputs._replace(bonus=per_chunk)
  if inputs.own_weight is not None:
    outputs = outputs._replace(own_weight=table)

  def body(at, gmem: GradientInputs, outs: GradientOutputs, smem: _Buffers):
    channels = pl.ds(at.block * TILE_WIDTH, TILE_WIDTH)
    part = lambda x: x.at[at.batch, at.tokens, shared_head(at.head, H, x), channels]
    cot = _from_values(at, channels, gmem, smem, decays, H, backend)
    if outs.d_total is not None:
      store_unoptimized(outs.d_total.at[at.batch, at.head, at.chunk, channels], cot.total)
    load_tiles((part(gmem.q), smem.q), (part(gmem.k), smem.k))
    if scalar:
      d_q, d_k = _scalar_decay(at, gmem, outs, smem, cot, decays, rank, backend)
    else:
      decay = decay_of_block(
        gmem.log_decay,
        at,
        channels,
        smem.decay,
        heads=H,
        length=length,
        read_first=inputs.bonus is not None,
        backend=backend,
      )
      d_q, d_k = _channel_decay(at, channels, decay, gmem, outs, smem, cot, decays, backend)
    for target, d_x in ((outs.q, d_q), (outs.k, d_k)):
      store_tile(target.at[at.batch, at.tokens, at.head, channels], d_x * scale, smem.v)

  tile = smem_tile(C, TILE_WIDTH)
  buffers = DecayBuffers(None, None, None) if scalar else DecayBuffers.of(log_decay)
  vector = plgpu.SMEM((TILE_WIDTH,), jnp.float32)
  return launch_per_chunk(
    body,
    inputs,
    outputs,
    _Buffers(tile, tile, tile, tile, tile, tile, vector, buffers),
    sizes=(K // TILE_WIDTH, N, H, B),
    chunk=C,
    name="linear_attention_ampere_query_key_gradients",
    backend=backend,
  )


class ValueInputs(NamedTuple):
  """Arrays of `value_gradients`, or their GMEM references."""

  k: Any  # [B, T, H, K] bfloat16: decayed to the chunk's end unless `after` is given
  d_out: Any  # [B, T, H, V] bfloat16: G
  scores: Any  # [B, H, T, C] bfloat16
  adjoints: Any  # [B, H, N, K, V] bfloat16: A
  after: Any  # of `ScalarDecayTables`, or None


class _ValueBuffers(NamedTuple):
  k: Any  # [C, K]
  d_out: Any  # [C, 64]
  scores: Any  # [C, C]
  adjoint: Any  # [K, 64]


@with_int32_indices
def value_gradients(inputs: ValueInputs, *, heads: int, scale: float, backend: Mma) -> jax.Array:
  """dv [B, T, H, V] bfloat16; a CTA has 64 of its columns."""
  (B, T, _, V), K, H = inputs.d_out.shape, inputs.k.shape[-1], heads

  def body(at, gmem: ValueInputs, out_gmem, smem: _ValueBuffers):
    here = at.batch, at.tokens
    load_tiles(
      (gmem.k.at[(*here, shared_head(at.head, H, gmem.k))], smem.k),
      (gmem.d_out.at[(*here, at.head, at.channels)], smem.d_out),
      (gmem.scores.at[at.batch, at.head, at.tokens], smem.scores),
      (gmem.adjoints.at[at.batch, at.head, at.chunk, :, at.channels], smem.adjoint),
    )
    (d_v,) = backend.dots(Dots([(smem.k.at[:, x], smem.adjoint.at[x]) for x in blocks_of(K)]))
    if gmem.after is not None:
      d_v = d_v * broadcast_rows(load_row_vector(at.table_row(gmem.after)), (C, C))
    d_v = backend.dot(transpose_ref(smem.scores), smem.d_out, start=d_v)
    store_tile(out_gmem.at[(*here, at.head, at.channels)], d_v * scale, smem.d_out)

  tile = smem_tile(C, TILE_WIDTH)
  return launch_per_chunk(
    body,
    inputs,
    jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16),
    _ValueBuffers(smem_tile(C, K), tile, tile, smem_tile(K, TILE_WIDTH)),
    sizes=(V // TILE_WIDTH, T // C, H, B),
    chunk=C,
    name="linear_attention_ampere_value_gradients",
    backend=backend,
  )

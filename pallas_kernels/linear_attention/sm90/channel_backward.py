"""Backward kernels of linear attention for decays per key channel: dq, dk, dv and the decays'.

Symbols and formulas as in `backward.py`. Queries and keys are processed in blocks of 64 channels,
each with its own product for dP: it is small, and the blocks then fit several CTAs onto an SM. The
gradient of a decay comes through the factors of `intra_chunk`: each is an exponential of a sum of
log decays of one sign, so no gradient is a difference of large numbers.

At document boundaries dP is masked, and terms with S, z, A, y are dropped, by
`core.boundaries.DocumentBoundaries`, as in the forward pass.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries, StateDocuments, select_rows
from pallas_kernels.core.chunk_grid import (
  Tiles,
  broadcast_diagonal,
  channel_vector,
  chunk_kernel,
  per_head,
  state_key_block_tile,
  state_tile,
  wait_all,
)
from pallas_kernels.core.wgmma import (
  COMPILER_PARAMS,
  TILE_WIDTH,
  WITHOUT_SCRATCH,
  Backend,
  Dots,
  Ref,
  broadcast_cols,
  broadcast_rows,
  fill_ones_column,
  iota,
  load_col_vector,
  load_row_vector,
  load_scaled,
  load_tile,
  smem_tile,
  transpose_ref,
)
from pallas_kernels.linear_attention.sm90 import intra_chunk
from pallas_kernels.linear_attention.sm90.intra_chunk import (
  AFTER,
  BEFORE,
  KEY,
  QUERY,
  ConstantDecayFactors,
  DecayScratch,
  decay_factors,
)
from pallas_kernels.linear_attention.types import Cotangents, Inputs, Options, Residuals

# log2 of how far factors of per-token decays may grow where the decays want a gradient: what pairs
# on one side of a subchunk's middle contribute to its tokens cancels, more with faster decays.
GRADIENT_LIMIT = 12.0


class _Vectors(NamedTuple):
  """Arrays that stay in GMEM."""

  d_denominator: Any
  key_sum: Any  # z or y
  log_decay: Any
  bonus: Any
  documents: DocumentBoundaries
  level: Any  # [H, K / 64] int32, of subchunks; constant decays
  d_total: Any = None  # [B, H, N, K] float32, per-token decays
  d_log_decay: Any = None  # [B, T, H, K] float32, per-token decays


class _Scratch(NamedTuple):
  """SMEM next to the tiles."""

  decay: DecayScratch
  lhs: Any  # [2, C, C], of `Backend.to_lhs`
  spare: Any  # [1, C, 64], where no other tile is dead


class _QueryTiles(NamedTuple):
  """Tiles of `query_gradient`; k, q and state [64, V] are of one block of channels."""

  d_out: Any
  k: Any
  q: Any
  state: Any
  v: Any


class _QueryOutputs(NamedTuple):
  q: Any  # dq
  log_decay: Any  # float32, the queries' part: [B, T, H, K], or [B, H, N, K] for constant decays
  bonus: Any  # [B, H, N, K] float32


class _Shared(NamedTuple):
  """Values and buffers that the blocks of channels of a chunk share."""

  states: StateDocuments | None  # of `key_gradient`; the other kernel has no registers for a branch
  d_rows: Any  # [C]: d, or None
  from_state: Any  # [C, 64]: the product with the state, where values come in parts; or None
  right_smem: Ref  # [C, 64]: the right operand of products
  d_scores_smem: Ref  # [C, C]: dP


def query_gradient(
  inputs: Inputs,
  cot: Cotangents,
  states: jax.Array,  # [B, H, N, K, V] bfloat16: S
  key_sums: jax.Array | None,  # [B, H, N, K] float32: z
  documents: DocumentBoundaries,
  options: Options,
) -> _QueryOutputs:
  """dq, with a bonus its gradient, and if `cot.decays` the queries' part of the decays'.

  Without `scale`, but for dq.
  """
  q, k, v, log_decay, bonus, *_ = inputs
  backend, C, config = options.backend, options.config.chunk, options.config.query_gradient
  decays, parts, shape = cot.decays, config.value_parts, (C, TILE_WIDTH)
  read_first, per_token = bonus is not None, log_decay.ndim == 4

  def body(at, buffers):
    tiles, arrived, gmem, scratch, _ = buffers
    d_rows = None
    if gmem.d_denominator is not None:
      d_rows = load_row_vector(gmem.d_denominator.at[at.batch, at.head, at.tokens])
    d_scores, d_before = _products_over_values(tiles, arrived, tiles.d_out, tiles.v, parts, backend)
    if d_rows is not None:
      d_scores = d_scores + broadcast_rows(d_rows, d_scores.shape)
    d_scores = gmem.documents.mask_scores(at, d_scores)
    # v is dead: dP is in registers.
    right_smem, d_scores_smem = _two_tiles(tiles.v, scratch.spare)
    d_scores_smem[...] = d_scores.astype(jnp.bfloat16)
    return [], _Shared(None, d_rows, d_before, right_smem, d_scores_smem)

  def per_block(at, number, buffers, shared):
    tiles, arrived, gmem, scratch, outs = buffers
    _, d_rows, d_before, right_smem, d_scores_smem = shared
    f = _factors_of(inputs, at, gmem, scratch, options)
    f.choose_level(GRADIENT_LIMIT if decays else intra_chunk.LARGEST_LOG2)
    z: Any = None
    weight: Any = None
    if d_rows is not None:
      z = load_col_vector(gmem.key_sum.at[at.batch, at.head, at.chunk, at.channels])
    if read_first:
      weight = load_col_vector(gmem.bonus.at[at.head, at.channels])
    k_smem, state_smem = tiles.k.at[number], tiles.state.at[number]
    queries = lambda: load_tile(tiles.q.at[number])
    pairs = _Pairs(k_smem, right_smem, d_scores_smem, scratch.lhs, backend)

    arrived.k.wait(number)
    if tiles.q is not None:
      arrived.q.wait(number)
    if read_first:
      d_q = broadcast_diagonal(load_tile(d_scores_smem), shape) * load_tile(k_smem)
      outs.bonus.store(at, jnp.sum(d_q * queries(), axis=0))
      d_q = d_q * broadcast_cols(weight, shape)
    else:
      (d_q,) = backend.dots(pairs.same_token())
    decay_grad: Any = _DecayGradient(f, queries, right_smem) if decays else None
    acc = None
    left, right, signs = f.in_subchunk()
    lags = f.lags() if decays and isinstance(f, ConstantDecayFactors) else None
    d_left, d_lags = pairs.cotangent(intra_chunk.subchunk_pairs(C, f.level), right, lags)
    d_left = d_left * left
    if decays and per_token:
      acc = decay_grad.accumulate(None, d_left, QUERY, signs)
    elif decays:
      acc = d_lags * left
    d_q, acc = _through_merges(f, pairs, decay_grad, d_q + d_left, acc)

    if d_before is None:
      arrived.state.wait(number)
      d_before = backend.dot(tiles.d_out, transpose_ref(state_smem))
    if d_rows is not None:
      d_before = d_before + broadcast_rows(d_rows, shape) * broadcast_cols(z, shape)
    signs = f.signs(BEFORE)
    before = f.factor(signs)
    d_before = d_before * select_rows(gmem.documents.sees_entering_state(at), before)
    if decays:
      acc = decay_grad.accumulate(acc, d_before, BEFORE, signs)
      if not per_token:
        ones_smem = k_smem  # k is dead: its last product is done
        acc = _sum_over_tokens(acc * queries(), right_smem, ones_smem, backend)
      outs.log_decay.store(at, acc)
    d_q_smem = k_smem  # k is dead
    d_q_smem[...] = ((d_q + d_before) * cot.scale).astype(jnp.bfloat16)
    return [(d_q_smem, outs.q.at(at))]

  (B, T, _, K), H = q.shape, inputs.heads
  tiles, per_chunk = Tiles(C, H), channel_vector(B, H, T // C, K)
  return _launch(
    "linear_attention_query_gradient",
    body,
    per_block,
    _QueryTiles(
      d_out=tiles.tokens(cot.d_out, parts),
      k=tiles.token_block(k),
      q=tiles.token_block(q) if decays or read_first else None,
      state=state_key_block_tile(states, parts),
      v=tiles.tokens(v, parts),
    ),
    _Vectors(cot.d_denominator, key_sums, log_decay, bonus, documents, _levels(log_decay)),
    _QueryOutputs(
      tiles.token_block(per_head(q, H)),
      _decay_gradient_spec(log_decay, tiles, per_chunk) if decays else None,
      per_chunk if read_first else None,
    ),
    options,
    config,
  )


class _KeyTiles(NamedTuple):
  """Tiles of `key_gradient`; q, k and state [64, V] are of one block of channels."""

  d_out: Any
  k: Any
  q: Any
  scores: Any
  state: Any
  v: Any


class _KeyOutputs(NamedTuple):
  k: Any  # dk
  v: Any  # dv, with scores
  log_decay: Any  # float32: per-token decays [B, T, H, K], all; constant [B, H, N, K], keys' part


def key_gradient(
  inputs: Inputs,
  cot: Cotangents,
  scores: jax.Array | None,  # [B, H, T, C] bfloat16, unless `Config.separate_values`
  adjoints: jax.Array,  # [B, H, N, K, V] bfloat16: A
  key_sums: jax.Array | None,  # [B, H, N, K] float32: y
  documents: DocumentBoundaries,
  d_total: jax.Array | None,  # [B, H, N, K] float32: of the log decay of chunks, without `scale`
  d_log_decay: jax.Array | None,  # [B, T, H, K] float32: the queries' part, per-token decays
  options: Options,
) -> _KeyOutputs:
  """dk, with `scores` dv, and if `cot.decays` the gradient of the decays; of constant ones without
  `scale`.

  Rows are the tokens j here: dP is computed transposed.
  """
  q, k, v, log_decay, bonus, *_ = inputs
  backend, C, config = options.backend, options.config.chunk, options.config.key_gradient
  decays, per_token = cot.decays, log_decay.ndim == 4
  parts, shape = config.value_parts, (C, TILE_WIDTH)

  def body(at, buffers):
    tiles, arrived, gmem, scratch, outs = buffers
    states = gmem.documents.load_states(at)
    d_cols = None
    if gmem.d_denominator is not None:
      d_cols = load_col_vector(gmem.d_denominator.at[at.batch, at.head, at.tokens])
    d_scores, d_after = _products_over_values(tiles, arrived, tiles.v, tiles.d_out, parts, backend)
    if d_cols is not None:
      d_scores = d_scores + broadcast_cols(d_cols, d_scores.shape)
    d_scores = gmem.documents.mask_scores(at, d_scores, states)
    copies = []
    if tiles.scores is None:
      # d_out is dead: dP is in registers.
      right_smem, d_scores_smem = _two_tiles(tiles.d_out, scratch.spare)
    else:
      d_v = (values(at, states, buffers) * cot.scale).astype(jnp.bfloat16)
      d_v_smem = tiles.d_out  # d_out is dead: `values` was its last use
      d_v_smem[...] = d_v
      copies.append((d_v_smem, outs.v.at(at)))
      right_smem, d_scores_smem = scratch.spare.at[0], tiles.scores  # scores are dead, too
    d_scores_smem[...] = d_scores.astype(jnp.bfloat16)
    return copies, _Shared(states, None, d_after, right_smem, d_scores_smem)

  def values(at, states, buffers):
    """[C, V]: dv without `scale`."""
    tiles, arrived, gmem, scratch, _ = buffers
    arrived.scores.wait()
    d_v: Any = None
    pairs = [(transpose_ref(tiles.scores), tiles.d_out)]
    for number in range(k.shape[3] // TILE_WIDTH):
      f = _factors_of(inputs, at._replace(block=number), gmem, scratch, options)
      after = f.factor(f.signs(AFTER))
      arrived.k.wait(number)
      left = load_scaled(tiles.k.at[number], after)
      left = gmem.documents.select_reaching(at, states, left)
      arrived.state.wait(number)
      pairs.append((backend.to_lhs(left, scratch.lhs, 0), tiles.state.at[number]))
      (d_v,) = backend.dots(Dots(pairs, d_v))
      pairs = []
    return d_v

  def per_block(at, number, buffers, shared):
    tiles, arrived, gmem, scratch, outs = buffers
    states, _, d_after, right_smem, d_scores_smem = shared
    f = _factors_of(inputs, at, gmem, scratch, options)
    f.choose_level(GRADIENT_LIMIT if decays else intra_chunk.LARGEST_LOG2)
    y: Any = None
    weight: Any = None
    acc: Any = None
    if gmem.d_denominator is not None:
      y = load_col_vector(gmem.key_sum.at[at.batch, at.head, at.chunk, at.channels])
    if bonus is not None:
      weight = load_col_vector(gmem.bonus.at[at.head, at.channels])
    if decays and per_token:
      d_queries = gmem.d_log_decay.at[at.batch, at.tokens, at.head, at.channels]
      acc = plgpu.load(d_queries, layout=plgpu.Layout.WGMMA, optimized=False)
      d_chunk = load_col_vector(gmem.d_total.at[at.batch, at.head, at.chunk, at.channels])
      acc = acc + broadcast_cols(d_chunk, shape)
    q_smem, state_smem = tiles.q.at[number], tiles.state.at[number]
    keys = lambda: load_tile(tiles.k.at[number])
    pairs = _Pairs(q_smem, right_smem, d_scores_smem, scratch.lhs, backend)

    arrived.q.wait(number)
    if tiles.scores is None:
      if tiles.k is not None:
        arrived.k.wait(number)
      if d_after is None:
        arrived.state.wait(number)
    products = [pairs.same_token()] if bonus is None else []
    if d_after is None:
      products = [Dots([(tiles.v, transpose_ref(state_smem))]), *products]
    d_k = backend.dots(*products) if products else []
    if d_after is None:
      d_after, *d_k = d_k
    if bonus is not None:
      d_k = [
        broadcast_diagonal(load_tile(d_scores_smem), shape)
        * load_tile(q_smem)
        * broadcast_cols(weight, shape)
      ]
    if y is not None:
      d_after = d_after + broadcast_cols(y, shape)
    signs = f.signs(AFTER)
    d_after = d_after * f.factor(signs)
    d_after = gmem.documents.select_reaching(at, states, d_after)
    decay_grad: Any = _DecayGradient(f, keys, right_smem) if decays else None
    if decays:
      acc = decay_grad.accumulate(acc, d_after, AFTER, signs)

    left, right, signs = f.in_subchunk()
    mask = intra_chunk.subchunk_pairs(C, f.level, transposed=True)
    d_right = pairs.cotangent(mask, left)[0] * right
    if decays and per_token:  # for constant decays `query_gradient` has these pairs
      acc = decay_grad.accumulate(acc, d_right, KEY, signs)
    d_k = d_k[0] + d_after + d_right
    d_k, acc = _through_merges(f, pairs, decay_grad, d_k, acc, transposed=True)
    if decays:
      if not per_token:
        ones_smem = q_smem  # q is dead: its last product is done
        acc = _sum_over_tokens(acc * keys(), right_smem, ones_smem, backend)
      outs.log_decay.store(at, acc * cot.scale if per_token else acc)
    d_k_smem = q_smem  # q is dead
    d_k_smem[...] = (d_k * cot.scale).astype(jnp.bfloat16)
    return [(d_k_smem, outs.k.at(at))]

  (B, T, _, K), H = q.shape, inputs.heads
  tiles, per_chunk = Tiles(C, H), channel_vector(B, H, T // C, K)
  per_token_grad = decays and per_token  # of constant decays the parts are summed outside
  return _launch(
    "linear_attention_key_gradient",
    body,
    per_block,
    _KeyTiles(
      d_out=tiles.tokens(cot.d_out, parts),
      k=tiles.token_block(k) if decays or scores is not None else None,
      q=tiles.token_block(q),
      scores=None if scores is None else tiles.scores(scores),
      state=state_key_block_tile(adjoints, parts),
      v=tiles.tokens(v, parts),
    ),
    _Vectors(
      cot.d_denominator,
      key_sums,
      log_decay,
      bonus,
      documents,
      _levels(log_decay),
      d_total=d_total if per_token_grad else None,
      d_log_decay=d_log_decay if per_token_grad else None,
    ),
    _KeyOutputs(
      tiles.token_block(per_head(k, H)),
      None if scores is None else tiles.tokens(per_head(v, H)),
      _decay_gradient_spec(log_decay, tiles, per_chunk) if decays else None,
    ),
    options,
    config,
  )


class _ValueTiles(NamedTuple):
  d_out: Any
  k: Any
  scores: Any
  state: Any


class _ValueOutputs(NamedTuple):
  v: Any


def value_gradient(kept: Residuals, cot: Cotangents, adjoints: jax.Array, options: Options):
  """dv [B, T, H, V], of keys that are decayed to the chunk's end; adjoints [B, H, N, K, V]: A."""
  backend, C = options.backend, options.config.chunk

  def body(at, buffers):
    tiles, arrived, _, _, outs = buffers
    wait_all(arrived)
    pairs = [(transpose_ref(tiles.scores), tiles.d_out), (tiles.k, tiles.state)]
    (d_v,) = backend.dots(Dots(pairs))
    d_v_smem = tiles.d_out  # d_out is dead: its last product is done
    d_v_smem[...] = (d_v * cot.scale).astype(jnp.bfloat16)
    return [(d_v_smem, outs.v.at(at))]

  tiles = Tiles(C, cot.d_out.shape[2])
  d_out = tiles.tokens(cot.d_out)
  return chunk_kernel(
    body,
    _ValueTiles(d_out, tiles.tokens(kept.k), tiles.scores(kept.scores), state_tile(adjoints)),
    None,
    _ValueOutputs(d_out),
    chunk=C,
    name="linear_attention_value_gradient",
    backend=backend,
  ).v


# What the two kernels share.


def _products_over_values(tiles, arrived, left_smem, right_smem, parts, backend):
  """dP = left right^T, and the product of left with the state; None if values are of one part.

  Both are sums over value columns, so the next part takes the place of one that has been read.
  """
  d_scores: Any = None
  from_state: Any = None
  for part in range(parts):
    if part > 0:
      plgpu.commit_smem()  # all warps have read the part before
      for arrival in (arrived.v, arrived.d_out, arrived.state):
        arrival.start(part)
    arrived.v.wait()
    arrived.d_out.wait()
    products = [Dots([(left_smem, transpose_ref(right_smem))], d_scores)]
    if parts > 1:
      arrived.state.wait()
      products.append(Dots([(left_smem, transpose_ref(tiles.state.at[0]))], from_state))
    d_scores, *rest = backend.dots(*products)
    from_state = rest[0] if rest else None
  return d_scores, from_state


def _two_tiles(dead_smem: Ref, spare_smem: Ref | None) -> Sequence[Ref]:
  """Two tiles [C, 64]: parts of a dead tile [C, V] or, if it has one only, that and the spare."""
  if dead_smem.shape[1] == TILE_WIDTH:
    assert spare_smem is not None
    return dead_smem, spare_smem.at[0]
  return [dead_smem.at[:, pl.ds(start, TILE_WIDTH)] for start in (0, TILE_WIDTH)]


class _Pairs(NamedTuple):
  """Products of dP with the rows of the other operand of the scores."""

  other_smem: Ref  # [C, 64]: keys or queries
  right_smem: Ref  # [C, 64]: to be overwritten
  d_scores_smem: Ref  # [C, C]: dP
  lhs_smem: Ref | None
  backend: Backend

  def cotangent(self, mask, factor, lags=None):
    """Cotangent of one operand of the masked intra-chunk product.

    `where(mask, dP, 0) @ (factor * other)`, and with `lags` also `(dP * lags) @ ...`, the term of
    the gradient of a constant decay; or None.
    """
    self.right_smem[...] = load_scaled(self.other_smem, factor)
    d_scores = jnp.where(mask, load_tile(self.d_scores_smem), 0.0)
    lefts = [d_scores] if lags is None else [d_scores, d_scores * lags]
    lefts = [self.backend.to_lhs(x, self.lhs_smem, n) for n, x in enumerate(lefts)]
    plgpu.commit_smem()
    results = self.backend.dots(*(Dots([(left, self.right_smem)]) for left in lefts))
    return results if len(results) == 2 else (*results, None)

  def same_token(self) -> Dots:
    """The diagonal of dP times the rows of the other operand."""
    shape = self.d_scores_smem.shape
    on = iota(shape, 0) == iota(shape, 1)
    diagonal = jnp.where(on, load_tile(self.d_scores_smem), 0.0)
    return Dots([(self.backend.to_lhs(diagonal, self.lhs_smem, 0), self.other_smem)])


class _DecayGradient(NamedTuple):
  """The gradient of log decays through the factors of queries or of keys."""

  factors: Any
  x: Any  # () -> [C, 64]
  staging_smem: Ref

  def accumulate(self, acc, d_x, which, signs):
    """`acc` plus the contribution of the factor of `which`, whose signs may be in SMEM."""
    return self.factors.accumulate_decay_grad(acc, self.x, d_x, which, self.staging_smem, signs)


def _through_merges(factors, pairs, decay_grad, d_x, acc, *, transposed=False):
  """Adds to d_x, and to the decay gradient `acc`, what comes from pairs of different subchunks."""
  chunk = d_x.shape[0]

  def merge(level, carry):
    d_x, acc = carry
    size = intra_chunk.tokens_at(level)
    signs = factors.signs(size)
    factor = factors.factor(signs)
    mask = intra_chunk.merged_pairs(chunk, size, transposed=transposed)
    added = pairs.cotangent(mask, factor)[0] * factor
    if decay_grad is not None:
      acc = decay_grad.accumulate(acc, added, size, signs)
    return d_x + added, acc

  return lax.fori_loop(factors.level, intra_chunk.LEVELS, merge, (d_x, acc))


def _sum_over_tokens(x, staging_smem, ones_smem, backend):
  """The sum over the rows of x [C, 64]."""
  staging_smem[...] = x.astype(jnp.bfloat16)
  fill_ones_column(ones_smem)
  plgpu.commit_smem()
  return backend.sum_rows([staging_smem], ones_smem)


def _factors_of(inputs, at, gmem, scratch, options):
  """The decay factors of a chunk and a block of channels."""
  level = 0 if gmem.level is None else gmem.level[at.head, at.block]
  return decay_factors(
    gmem.log_decay,
    level,
    scratch.decay,
    at,
    at.channels,
    heads=inputs.heads,
    length=options.length,
    read_first=inputs.bonus is not None,
    backend=options.backend,
  )


def _levels(log_decay):
  """[H, blocks] int32, of constant decays; None for per-token decays, which the kernels look at."""
  if log_decay.ndim == 4:
    return None
  return intra_chunk.subchunk_level(log_decay.reshape(log_decay.shape[0], -1, TILE_WIDTH))


def _decay_gradient_spec(log_decay, tiles, per_chunk):
  if log_decay.ndim == 4:
    return tiles.token_block(per_head(log_decay, tiles.heads))
  return per_chunk


def _launch(name, body, per_block, tiles, vectors, outputs, options, config):
  backend, C = options.backend, options.config.chunk
  log_decay, value_width = vectors.log_decay, tiles.v.array.shape[-1]
  with_scores = getattr(tiles, "scores", None) is not None
  scratch = _Scratch(
    decay=DecayScratch.of(log_decay, C),
    lhs=backend.lhs_scratch(2, C, C),
    spare=smem_tile(1, C, TILE_WIDTH) if value_width == TILE_WIDTH or with_scores else None,
  )
  return chunk_kernel(
    body,
    tiles,
    vectors,
    outputs,
    chunk=C,
    per_block=per_block,
    blocks=log_decay.shape[-1] // TILE_WIDTH,
    blocks_per_cta=config.blocks_per_cta,
    scratch=scratch,
    name=name,
    backend=backend,
    compiler_params=WITHOUT_SCRATCH if with_scores else COMPILER_PARAMS,
  )

"""Backward pass of linear attention over chunks.

With G the cotangent of S^T q (and d that of the denominator, with a normalizer), S and z the state
and the key sum that enter a chunk, A and y the cotangents of those that leave it:

    dP_ij = G_i . v_j + d_i                                              i >= j
    dq_i  = before_i (S G_i + d_i z) + sum_j weight_ij dP_ij k_j
    dk_j  = after_j (A v_j + y)      + sum_i weight_ij dP_ij q_i
    dv_j  = after_j A^T k_j          + sum_i weight_ij (q_i . k_j) G_i

where before_i is the decay from the chunk's start to token i, after_j from token j to its end, and
weight_ij the decay between tokens j and i: one number each for scalar decays, one per key channel
otherwise. First `chunk_states` in reverse computes A and y at all chunk boundaries; then each chunk
is independent, and the other kernels run in one CTA per chunk. `scale` multiplies the results.

The kernels for scalar decays are here, those for decays per key channel in `channel_backward.py`.
At document boundaries pairs of tokens are masked, and terms with S, z, A, y are dropped, by
`core.boundaries.DocumentBoundaries`, as in the forward pass.

Heads h of a group that share queries and keys, but have values and scalar decays of their own, are
processed by one CTA, one after the other (`grouped_query_gradient`, `grouped_key_value_gradient`):

    dq_i  = sum_h before_ih S_h G_ih + sum_j (sum_h weight_ijh dP_ijh) k_j

and dk_j likewise. The sums over h stay in registers; the one in parentheses is multiplied by k (or
q) once, and the scores q . k of a pair are the same for all h.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries
from pallas_kernels.core.chunk_grid import (
  Tiles,
  TileSpec,
  chunk_kernel,
  decay_between_tokens,
  decay_of_sums,
  own_token,
  per_head,
  start_copies,
  state_tile,
  sum_of_groups,
  wait_all,
  with_own_weight,
)
from pallas_kernels.core.decay_tables import (
  SMALLEST_LOG_DECAY,
  ScalarDecayTables,
  TableGradients,
  scalar_decay_tables,
  token_decay_gradient,
)
from pallas_kernels.core.wgmma import (
  TILE_WIDTH,
  WITHOUT_SCRATCH,
  Backend,
  Dots,
  Ref,
  broadcast_cols,
  broadcast_rows,
  causal_mask,
  load_col_vector,
  load_row_vector,
  load_tile,
  smem_tile,
  transpose_ref,
  zero_accumulator,
)
from pallas_kernels.linear_attention.sequence import tokens_in_chunks
from pallas_kernels.linear_attention.sm90 import channel_backward
from pallas_kernels.linear_attention.sm90.intra_chunk import token_numbers
from pallas_kernels.linear_attention.sm90.splits import (
  initial_states_of_splits,
  normalizer_of,
  total_of_constant_decay,
)
from pallas_kernels.linear_attention.sm90.state_pipeline import (
  ChunkDecay,
  StateOutputs,
  chunk_states,
  constant_decay,
)
from pallas_kernels.linear_attention.types import (
  Cotangents,
  Inputs,
  Options,
  Residuals,
  has_channel_decay,
)


def backward(
  options: Options,
  inputs: Inputs,
  segments: jax.Array | None,
  kept: Any,  # `Residuals`
  cotangents: Sequence[jax.Array | None],  # of the results of `op.linear_attention`; None: zeros
  decays: bool,  # whether the decay wants a gradient
) -> Inputs:
  """Gradients of the inputs."""
  d_out, d_last_state, d_last_key_sum = cotangents
  if d_out is None:
    v = inputs.v
    d_out = jnp.zeros((*v.shape[:2], inputs.heads, v.shape[3]), v.dtype)
  scale, d_denominator = options.scale, None
  if options.normalize:
    d_out, d_denominator = division_gradient(
      d_out,
      kept.out,
      kept.denominator,
      length=options.length,
      scale=scale,
      chunk=options.config.chunk,
      backend=options.backend,
    )
    scale = 1.0
  shared = Cotangents(d_out, d_denominator, d_last_key_sum, scale, decays)
  d_last_state = None if d_last_state is None else d_last_state / scale
  documents = DocumentBoundaries.of(segments)
  rule = _channel_backward if has_channel_decay(inputs.log_decay) else _scalar_backward
  d_inputs = rule(options, inputs, documents, kept, shared, d_last_state)
  summed = {name: sum_of_groups(getattr(d_inputs, name), getattr(inputs, name)) for name in "qkv"}
  if inputs.log_decay.ndim == 4 and d_inputs.log_decay is not None:
    summed["log_decay"] = sum_of_groups(d_inputs.log_decay, inputs.log_decay)
  d_inputs = d_inputs._replace(**summed)
  scaled = ["q", "k", "v"] + ["log_decay"] * (inputs.log_decay.ndim == 4)
  rescaled = {
    name: scale * x
    for name, x in d_inputs._asdict().items()
    if name not in scaled and x is not None
  }
  d_inputs = d_inputs._replace(**rescaled)
  if d_inputs.log_decay is None:
    d_inputs = d_inputs._replace(log_decay=jnp.zeros_like(inputs.log_decay))
  return d_inputs


def _scalar_backward(options: Options, inputs: Inputs, documents, kept: Residuals, cot, d_last):
  config, tables = options.config, kept.tables
  adjoints = _state_cotangents(
    options, inputs.q, tables.before, inputs, documents, kept, cot, d_last
  )
  by_q: Any = None
  by_k: Any = None
  shared = tables, documents, options
  if config.query_gradient.heads_per_cta > 1:
    by_q = grouped_query_gradient(inputs, cot, kept.states, *shared)
  else:
    by_q = scalar_query_gradient(inputs, cot, kept.states, kept.key_sums, *shared)
  if config.key_gradient.heads_per_cta > 1:
    by_k = grouped_key_value_gradient(inputs, cot, adjoints.states, *shared)
  else:
    by_k = scalar_key_value_gradient(inputs, cot, adjoints.states, adjoints.key_sums, *shared)
  d_log_decay: Any = None
  if cot.decays:
    d_total = _total_decay_gradient(adjoints, kept).sum(-1)
    d_log_decay = _scalar_decay_gradient(
      options, inputs, documents, tables, by_q, by_k.after, d_total
    )
  d_own_weight = None if inputs.own_weight is None else by_q.own_weight.swapaxes(1, 2)
  d_state = _initial_state_gradients(inputs, adjoints)
  return Inputs(by_q.q, by_k.k, by_k.v, d_log_decay, None, *d_state, d_own_weight)


def _scalar_decay_gradient(options, inputs: Inputs, documents, tables, by_q, d_after, d_total):
  """The gradient of the log decays through their tables, without `scale`."""
  log_decay, T, C = inputs.log_decay, inputs.q.shape[1], options.config.chunk
  if log_decay.shape[1] > 1:
    d_tables = TableGradients(
      by_q.later, by_q.earlier, by_q.before, d_after, d_total * tables.total
    )
    d = token_decay_gradient(tables, d_tables, documents, chunk=C, backend=options.backend)
    d = d[:, :, : options.length].swapaxes(1, 2)
    return jnp.where(log_decay > SMALLEST_LOG_DECAY, d, 0.0)
  sizes = {"length": options.length, "padded": T, "chunk": C}
  of_decay = jax.vjp(lambda x: scalar_decay_tables(x, documents, **sizes), log_decay)[1]
  d_tables = ScalarDecayTables(by_q.later - by_q.earlier, by_q.before, d_after, d_total)
  (d_log_decay,) = of_decay(ScalarDecayTables(*map(_sum_to, d_tables, tables)))
  return d_log_decay


def _channel_backward(options: Options, inputs: Inputs, documents, kept: Residuals, cot, d_last):
  q, _, _, log_decay, bonus, *_ = inputs
  T = q.shape[1]
  adjoints = _state_cotangents(
    options, q if kept.q is None else kept.q, None, inputs, documents, kept, cot, d_last
  )
  d_v: Any = None
  joined = not options.config.separate_values
  if not joined:
    d_v = channel_backward.value_gradient(kept, cot, adjoints.states, options)
  by_q = channel_backward.query_gradient(
    inputs, cot, kept.states, kept.key_sums, documents, options
  )
  d_total = None
  if cot.decays:
    total = kept.decay
    if total is None:
      total = total_of_constant_decay(log_decay, documents, options, T)
    d_total = total * _total_decay_gradient(adjoints, kept)
  by_k = channel_backward.key_gradient(
    inputs,
    cot,
    kept.scores if joined else None,
    adjoints.states,
    adjoints.key_sums,
    documents,
    d_total,
    by_q.log_decay,
    options,
  )
  d_log_decay = by_k.log_decay
  if cot.decays and log_decay.ndim == 2:
    tokens = tokens_in_chunks(options, T)
    d_log_decay = by_q.log_decay + d_log_decay + tokens[:, None] * d_total
    d_log_decay = d_log_decay.sum((0, 2))
  d_bonus = None if bonus is None else by_q.bonus.sum((0, 2))
  d_kv, d_key_sum = _initial_state_gradients(inputs, adjoints)
  return Inputs(by_q.q, by_k.k, by_k.v if joined else d_v, d_log_decay, d_bonus, d_kv, d_key_sum)


def _state_cotangents(
  options: Options, q, weight, inputs: Inputs, documents, kept: Residuals, cot, d_last
) -> StateOutputs:
  """Cotangents of states and key sums at chunk boundaries, from the end to the start."""
  decay = constant_decay(options, inputs, documents) or ChunkDecay(kept.decay, q.shape[-1])
  normalizer = normalizer_of(options, inputs, cot.d_last_key_sum, weight, cot.d_denominator)
  initial, normalizer = initial_states_of_splits(
    q, cot.d_out, weight, decay, d_last, normalizer, options, heads=inputs.heads, reverse=True
  )
  return chunk_states(
    q,
    cot.d_out,
    weight,
    decay,
    initial,
    normalizer,
    kept.states if cot.decays else None,
    heads=inputs.heads,
    options=options,
    reverse=True,
  )


def _initial_state_gradients(inputs: Inputs, adjoints: StateOutputs):
  d_kv = None if inputs.kv is None else adjoints.last_state[:, :, 0]
  has_sum = adjoints.key_sums is not None and inputs.key_sum is not None
  return d_kv, adjoints.last_key_sum[:, :, 0] if has_sum else None


def _total_decay_gradient(adjoints: StateOutputs, kept: Residuals):
  """[B, H, N, K]: cotangent of the decay over each chunk, through the state and the key sum."""
  if adjoints.key_sums is None:
    return adjoints.overlap
  return adjoints.overlap + adjoints.key_sums * kept.key_sums


def _sum_to(x, like):
  """Sums [B, H, T or N] over what `like` [B|1, H, ...] shares."""
  x = x.reshape(*x.shape[:2], -1, like.shape[2]).sum(2)
  return x.sum(0, keepdims=True) if like.shape[0] == 1 else x


class _DivisionTiles(NamedTuple):
  d_out: Any
  out: Any


class _DivisionOutputs(NamedTuple):
  d_out: Any
  d_denominator: Any


def division_gradient(
  d_out: jax.Array,  # [B, T, H, V] bfloat16: the cotangent of out = scale n / D
  out: jax.Array,  # [B, T, H, V] bfloat16
  denominator: jax.Array,  # [B, H, T] float32: D; of tokens of padding anything, as `out` is there
  *,
  length: int,  # tokens before padding
  scale: float,
  chunk: int,
  backend: Backend,
) -> tuple[jax.Array, jax.Array]:
  """The cotangents of n, scale d_out / D [B, T, H, V] bfloat16, and of D, -(d_out . out) / D [B, H,
  T] float32; zero for tokens of padding.

  One kernel, because XLA reads the cotangent once for each of the two.
  """
  B, T, H, _ = out.shape

  def body(at, buffers):
    tiles, arrived, denominator_gmem, _, outs = buffers
    inverse = 1.0 / load_row_vector(denominator_gmem.at[at.batch, at.head, at.tokens])
    is_token = token_numbers(chunk) < length - at.chunk * chunk
    if length < T:
      inverse = jnp.where(is_token, inverse, 0.0)
    wait_all(arrived)
    d_rows = load_tile(tiles.d_out)
    d_denominator = -jnp.sum(d_rows * load_tile(tiles.out), axis=1) * inverse
    if length < T:
      d_denominator = jnp.where(is_token, d_denominator, 0.0)
    outs.d_denominator.store(at, d_denominator)
    result_smem = tiles.d_out  # d_out is dead: it is in registers
    d_n = d_rows * broadcast_rows(inverse * scale, d_rows.shape)
    result_smem[...] = d_n.astype(jnp.bfloat16)
    return [(result_smem, outs.d_out.at(at))]

  tiles = Tiles(chunk, H)
  return tuple(
    chunk_kernel(
      body,
      _DivisionTiles(tiles.tokens(d_out), tiles.tokens(out)),
      denominator,
      _DivisionOutputs(tiles.tokens(d_out), tiles.vector(B, T)),
      chunk=chunk,
      name="linear_attention_division_gradient",
      backend=backend,
    )
  )


class _ScalarTiles(NamedTuple):
  """Tiles [C, K], [C, V]; `state` [K, V] is S or A."""

  d_out: Any
  k: Any
  q: Any
  state: Any
  v: Any

  @classmethod
  def of(cls, inputs: Inputs, cot, states, chunk: int, *, reads_q: bool = True, grouped=False):
    """If `grouped`, with several heads per CTA, a stage has what each of them has of its own."""
    q, k, v, *_ = inputs
    tiles = Tiles(chunk, inputs.heads)
    own = TileSpec.for_each_head if grouped else lambda tile: tile
    return cls(
      d_out=own(tiles.tokens(cot.d_out)),
      k=tiles.tokens(k),
      q=tiles.tokens(q) if reads_q else None,
      state=own(state_tile(states)),
      v=own(tiles.tokens(v)),
    )


class _ScalarVectors(NamedTuple):
  cumulative: Any
  end: Any  # `before` or `after`
  d_denominator: Any
  key_sum: Any  # z or y
  documents: DocumentBoundaries
  own_weight: Any = None  # [B, H, T] float32

  @classmethod
  def of(cls, inputs: Inputs, cot: Cotangents, cumulative, end, key_sums, documents):
    """Those of kernels with one head per CTA."""
    own = None if inputs.own_weight is None else inputs.own_weight.swapaxes(1, 2)
    return cls(cumulative, end, cot.d_denominator, key_sums, documents.mask_only, own)


class _ScalarQueryOutputs(NamedTuple):
  q: Any  # dq
  before: Any  # [B, H, T] float32, of the tables; of `cumulative`: + later - earlier
  later: Any
  earlier: Any
  own_weight: Any  # [B, H, T] float32

  @classmethod
  def types(cls, inputs: Inputs, cot: Cotangents, chunk: int, heads_per_cta: int = 1):
    """With several heads per CTA dq is the sum over them."""
    (B, T, *_), H = inputs.v.shape, inputs.heads
    tiles = Tiles(chunk, H)
    table = tiles.vector(B, T) if cot.decays else None
    d_q = tiles.tokens(per_head(inputs.q, H // heads_per_cta))
    own_weight = None if inputs.own_weight is None else tiles.vector(B, T)
    return cls(d_q, table, table, table, own_weight)


def scalar_query_gradient(
  inputs: Inputs,
  cot: Cotangents,
  states: jax.Array,  # [B, H, N, K, V] bfloat16: S
  key_sums: jax.Array | None,  # [B, H, N, K] float32: z
  tables: ScalarDecayTables,
  documents: DocumentBoundaries,
  options: Options,
) -> _ScalarQueryOutputs:
  """dq and, if `cot.decays`, the cotangents of the decay tables, without `scale`."""
  backend, C, rank = options.backend, options.config.chunk, options.rank
  reads_q = cot.decays or inputs.own_weight is not None

  def body(at, buffers):
    tiles, arrived, gmem, lhs_smem, outs = buffers
    K = inputs.q.shape[-1]
    mask = gmem.documents.mask(at, causal_mask(C, rank=rank))
    weight = decay_between_tokens(at.table_row(gmem.cumulative))
    if gmem.own_weight is not None:
      own = gmem.own_weight.at[at.batch, at.head, at.tokens]
      weight = with_own_weight(weight, own, rank)
    before = load_row_vector(at.table_row(gmem.end))
    d_rows: Any = None
    z: Any = None
    if gmem.d_denominator is not None:
      d_rows = load_row_vector(gmem.d_denominator.at[at.batch, at.head, at.tokens])
      z = load_col_vector(gmem.key_sum.at[at.batch, at.head, at.chunk])
    wait_all(arrived)

    products = [
      Dots([(tiles.d_out, transpose_ref(tiles.v))]),
      Dots([(tiles.d_out, transpose_ref(tiles.state))]),
    ]
    if reads_q:
      products.append(Dots([(tiles.q, transpose_ref(tiles.k))]))
    d_scores, from_state, *scores = backend.dots(*products)
    if gmem.d_denominator is not None:
      d_scores = d_scores + broadcast_rows(d_rows, (C, C))
      from_state = from_state + broadcast_rows(d_rows, (C, K)) * broadcast_cols(z, (C, K))
    if gmem.own_weight is not None:
      own = jnp.where(own_token((C, C), rank), scores[0] * d_scores, 0.0)
      outs.own_weight.store(at, jnp.sum(own, axis=1))
    d_scores = jnp.where(mask, d_scores * weight, 0.0)
    if cot.decays:
      strict = causal_mask(C, strict=True, rank=rank)
      crossing = jnp.where(strict, scores[0] * d_scores, 0.0)
      outs.later.store(at, jnp.sum(crossing, axis=1))
      outs.earlier.store(at, jnp.sum(crossing, axis=0))
      outs.before.store(at, jnp.sum(load_tile(tiles.q) * from_state, axis=1))
    lhs = backend.to_lhs(d_scores, lhs_smem)
    d_q = backend.dot(lhs, tiles.k, start=from_state * broadcast_rows(before, (C, K)))
    d_q_smem = tiles.k  # k is dead: its last product is done
    d_q_smem[...] = (d_q * cot.scale).astype(jnp.bfloat16)
    return [(d_q_smem, outs.q.at(at))]

  return chunk_kernel(
    body,
    _ScalarTiles.of(inputs, cot, states, C, reads_q=reads_q),
    _ScalarVectors.of(inputs, cot, tables.cumulative, tables.before, key_sums, documents),
    _ScalarQueryOutputs.types(inputs, cot, C),
    chunk=C,
    scratch=backend.lhs_scratch(C, C),
    name="linear_attention_query_gradient",
    backend=backend,
  )


class _ScalarKeyOutputs(NamedTuple):
  k: Any  # dk
  v: Any  # dv
  after: Any  # [B, H, T] float32, of the tables

  @classmethod
  def types(cls, inputs: Inputs, cot: Cotangents, chunk: int, heads_per_cta: int = 1):
    """With several heads per CTA dk is the sum over them."""
    (B, T, *_), H = inputs.v.shape, inputs.heads
    tiles = Tiles(chunk, H)
    d_k = tiles.tokens(per_head(inputs.k, H // heads_per_cta))
    after = tiles.vector(B, T) if cot.decays else None
    return cls(d_k, tiles.tokens(per_head(inputs.v, H)), after)


def scalar_key_value_gradient(
  inputs: Inputs,
  cot: Cotangents,
  adjoints: jax.Array,  # [B, H, N, K, V] bfloat16: A
  key_sums: jax.Array | None,  # [B, H, N, K] float32: y
  tables: ScalarDecayTables,
  documents: DocumentBoundaries,
  options: Options,
) -> _ScalarKeyOutputs:
  """dk, dv and, if `cot.decays`, the cotangent of the table `after`, without `scale`.

  Rows are the tokens j here: scores and dP are computed transposed.
  """
  backend, C, rank = options.backend, options.config.chunk, options.rank

  def body(at, buffers):
    tiles, arrived, gmem, lhs_smem, outs = buffers
    K, V = inputs.q.shape[-1], inputs.v.shape[-1]
    mask = gmem.documents.mask(at, causal_mask(C, transposed=True, rank=rank))
    between = decay_between_tokens(at.table_row(gmem.cumulative), transposed=True)
    if gmem.own_weight is not None:
      own = gmem.own_weight.at[at.batch, at.head, at.tokens]
      between = with_own_weight(between, own, rank)
    weight = jnp.where(mask, between, 0.0)
    after = load_row_vector(at.table_row(gmem.end))
    d_cols: Any = None
    y: Any = None
    if gmem.d_denominator is not None:
      d_cols = load_col_vector(gmem.d_denominator.at[at.batch, at.head, at.tokens])
      y = load_col_vector(gmem.key_sum.at[at.batch, at.head, at.chunk])
    wait_all(arrived)

    scores, from_state = backend.dots(
      Dots([(tiles.k, transpose_ref(tiles.q))]), Dots([(tiles.k, tiles.state)])
    )
    lhs = backend.to_lhs(scores * weight, lhs_smem)
    d_v = backend.dot(lhs, tiles.d_out, start=from_state * broadcast_rows(after, (C, V)))
    d_scores, from_state = backend.dots(
      Dots([(tiles.v, transpose_ref(tiles.d_out))]),
      Dots([(tiles.v, transpose_ref(tiles.state))]),
    )
    d_v_smem = tiles.v  # v is dead: its last product is done
    d_v_smem[...] = (d_v * cot.scale).astype(jnp.bfloat16)
    copies = [(d_v_smem, outs.v.at(at))]
    if gmem.d_denominator is not None:
      d_scores = d_scores + broadcast_cols(d_cols, (C, C))
      from_state = from_state + broadcast_cols(y, (C, K))
    if cot.decays:
      outs.after.store(at, jnp.sum(load_tile(tiles.k) * from_state, axis=1))
    lhs = backend.to_lhs(d_scores * weight, lhs_smem)
    d_k = backend.dot(lhs, tiles.q, start=from_state * broadcast_rows(after, (C, K)))
    d_k_smem = tiles.k  # k is dead: the sum above was its last use
    d_k_smem[...] = (d_k * cot.scale).astype(jnp.bfloat16)
    return [*copies, (d_k_smem, outs.k.at(at))]

  return chunk_kernel(
    body,
    _ScalarTiles.of(inputs, cot, adjoints, C),
    _ScalarVectors.of(inputs, cot, tables.cumulative, tables.after, key_sums, documents),
    _ScalarKeyOutputs.types(inputs, cot, C),
    chunk=C,
    scratch=backend.lhs_scratch(C, C),
    name="linear_attention_key_value_gradient",
    backend=backend,
  )


class _GroupSums(NamedTuple):
  """Sums over the heads that a CTA has processed, float32 accumulators."""

  pairs: jax.Array  # [C, C]: weighted dP, of pairs that are masked anything
  state: tuple[jax.Array, ...]  # [C, 64] for each block of key channels: the terms with the state

  @classmethod
  def zero(cls, C: int, K: int) -> "_GroupSums":
    blocks = tuple(zero_accumulator(C, TILE_WIDTH) for _ in _blocks(K))
    return cls(zero_accumulator(C, C), blocks)

  def gradient(self, mask, rhs_smem: Ref, lhs_smem: Any, scale: float, backend: Backend) -> None:
    """Replaces k (or q) in `rhs_smem` [C, K], which was its last use, by dq (or dk)."""
    lhs = backend.to_lhs(jnp.where(mask, self.pairs, 0.0), lhs_smem)
    blocks = _blocks(rhs_smem.shape[1])
    sums = [
      backend.dot(lhs, rhs_smem.at[:, channels], start=start)
      for channels, start in zip(blocks, self.state, strict=True)
    ]
    for channels, total in zip(blocks, sums, strict=True):
      rhs_smem.at[:, channels][...] = (total * scale).astype(jnp.bfloat16)


def _blocks(width: int) -> list:
  """Slices of 64 columns: a product with all of them would not fit into the registers."""
  return [pl.ds(start, TILE_WIDTH) for start in range(0, width, TILE_WIDTH)]


class _TokenDecays(NamedTuple):
  """Decays of a head in a chunk, loaded before its tiles have arrived, computed later."""

  rows: jax.Array  # [C]: log decays summed from the chunk's start, per row of a tile of pairs
  cols: jax.Array  # [C]: the same per column
  end: jax.Array  # [C]: `before` or `after`

  @classmethod
  def load(cls, at, gmem: _ScalarVectors) -> "_TokenDecays":
    cumulative = at.table_row(gmem.cumulative)
    end = load_row_vector(at.table_row(gmem.end))
    return cls(load_row_vector(cumulative), load_col_vector(cumulative), end)

  def between_tokens(self, *, transposed: bool = False) -> jax.Array:
    """As `decay_between_tokens`."""
    return decay_of_sums(self.rows, self.cols, transposed=transposed)


def _add_state_terms(sums, first, lhs_smem, state_smem, end, x_smem, backend):
  """`sums` and `end` [C] times the product of a tile [C, V] with the state's transpose [V, K].

  By blocks of 64 key channels, of which `first` is the product of the first one. With `x_smem`
  [C, K] also the gradient of `end` [C], otherwise None.
  """
  result, d_end = [], None
  for n, (channels, total) in enumerate(zip(_blocks(state_smem.shape[0]), sums, strict=True)):
    product = backend.dot(lhs_smem, transpose_ref(state_smem.at[channels])) if n else first
    if x_smem is not None:
      part = jnp.sum(load_tile(x_smem.at[:, channels]) * product, axis=1)
      d_end = part if d_end is None else d_end + part
    result.append(total + product * broadcast_rows(end, product.shape))
  return tuple(result), d_end


def grouped_query_gradient(
  inputs: Inputs,  # q and k of G heads, v of H
  cot: Cotangents,
  states: jax.Array,  # [B, H, N, K, V] bfloat16: S
  tables: ScalarDecayTables,
  documents: DocumentBoundaries,
  options: Options,
) -> _ScalarQueryOutputs:
  """As `scalar_query_gradient`, but dq [B, T, H / heads_per_cta, K] is summed over heads."""
  backend, C, K = options.backend, options.config.chunk, inputs.k.shape[-1]
  config = options.config.query_gradient

  def body(at, buffers, over_heads):
    tiles, arrived, gmem, lhs_smem, outs = buffers
    wait_all(arrived)
    scores: Any = None
    if cot.decays:
      strict = gmem.documents.mask(at, causal_mask(C, strict=True))
      scores = jnp.where(strict, backend.dot(tiles.q, transpose_ref(tiles.k)), 0.0)

    def step(at, tiles, wait, sums):
      decays = _TokenDecays.load(at, gmem)
      wait()
      d_scores, from_state = backend.dots(
        Dots([(tiles.d_out, transpose_ref(tiles.v))]),
        Dots([(tiles.d_out, transpose_ref(tiles.state.at[pl.ds(0, TILE_WIDTH)]))]),
      )
      d_scores = d_scores * decays.between_tokens()
      if cot.decays:
        # Masked pairs have the score 0, which selects: their dP may be anything.
        crossing = jnp.where(scores != 0.0, scores * d_scores, 0.0)
        outs.later.store(at, jnp.sum(crossing, axis=1))
        outs.earlier.store(at, jnp.sum(crossing, axis=0))
      state_sums, d_before = _add_state_terms(
        sums.state, from_state, tiles.d_out, tiles.state, decays.end, tiles.q, backend
      )
      if cot.decays:
        outs.before.store(at, d_before)
      return _GroupSums(sums.pairs + d_scores, state_sums)

    sums = over_heads(step, _GroupSums.zero(C, K))
    d_q_smem = tiles.k
    mask = gmem.documents.mask(at, causal_mask(C))
    sums.gradient(mask, d_q_smem, lhs_smem, cot.scale, backend)
    return [(d_q_smem, outs.q.at(at))]

  return chunk_kernel(
    body,
    _ScalarTiles.of(inputs, cot, states, C, reads_q=cot.decays, grouped=True),
    _ScalarVectors(tables.cumulative, tables.before, None, None, documents.mask_only),
    _ScalarQueryOutputs.types(inputs, cot, C, config.heads_per_cta),
    chunk=C,
    heads_per_cta=config.heads_per_cta,
    num_stages=config.head_stages,
    scratch=backend.lhs_scratch(C, C),
    name="linear_attention_query_gradient",
    backend=backend,
  )


class _ValueScratch(NamedTuple):
  lhs: Any  # of `Backend.to_lhs`
  d_v: Any  # [C, V]: dv of a head, which is stored while the next head's is computed


def grouped_key_value_gradient(
  inputs: Inputs,  # q and k of G heads, v of H
  cot: Cotangents,
  adjoints: jax.Array,  # [B, H, N, K, V] bfloat16: A
  tables: ScalarDecayTables,
  documents: DocumentBoundaries,
  options: Options,
) -> _ScalarKeyOutputs:
  """As `scalar_key_value_gradient`, but dk [B, T, H / heads_per_cta, K] is summed over heads."""
  backend, C, K, V = options.backend, options.config.chunk, inputs.k.shape[-1], inputs.v.shape[-1]
  config = options.config.key_gradient

  def body(at, buffers, over_heads):
    tiles, arrived, gmem, scratch, outs = buffers
    wait_all(arrived)
    mask = gmem.documents.mask(at, causal_mask(C, transposed=True))
    scores = jnp.where(mask, backend.dot(tiles.k, transpose_ref(tiles.q)), 0.0)

    def step(at, tiles, wait, sums):
      decays = _TokenDecays.load(at, gmem)
      wait()
      d_scores, from_state = backend.dots(
        Dots([(tiles.v, transpose_ref(tiles.d_out))]),
        Dots([(tiles.v, transpose_ref(tiles.state.at[pl.ds(0, TILE_WIDTH)]))]),
      )
      weight = decays.between_tokens(transposed=True)
      lhs = backend.to_lhs(scores * weight, scratch.lhs)
      pairs = sums.pairs + d_scores * weight
      k_smem = tiles.k if cot.decays else None
      state_sums, d_after = _add_state_terms(
        sums.state, from_state, tiles.v, tiles.state, decays.end, k_smem, backend
      )
      if cot.decays:
        outs.after.store(at, d_after)
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # dv of the head before
      for columns in _blocks(V):
        from_state = backend.dot(tiles.k, tiles.state.at[:, columns])
        from_state = from_state * broadcast_rows(decays.end, from_state.shape)
        d_v = backend.dot(lhs, tiles.d_out.at[:, columns], start=from_state)
        scratch.d_v.at[:, columns][...] = (d_v * cot.scale).astype(jnp.bfloat16)
      start_copies([(scratch.d_v, outs.v.at(at))])
      return _GroupSums(pairs, state_sums)

    sums = over_heads(step, _GroupSums.zero(C, K))
    d_k_smem = tiles.q
    sums.gradient(mask, d_k_smem, scratch.lhs, cot.scale, backend)
    return [(d_k_smem, outs.k.at(at))]

  return chunk_kernel(
    body,
    _ScalarTiles.of(inputs, cot, adjoints, C, grouped=True),
    _ScalarVectors(tables.cumulative, tables.after, None, None, documents.mask_only),
    _ScalarKeyOutputs.types(inputs, cot, C, config.heads_per_cta),
    chunk=C,
    heads_per_cta=config.heads_per_cta,
    num_stages=config.head_stages,
    scratch=_ValueScratch(backend.lhs_scratch(C, C), smem_tile(C, V)),
    name="linear_attention_key_value_gradient",
    backend=backend,
    compiler_params=WITHOUT_SCRATCH,
  )

"""Gradients of each chunk for decays per key channel, in one CTA per block of 64 channels.

Symbols as in `backward.py` and `channel_chunks.py`; d_ij are the decays between tokens j and i, and
bef and aft those from the chunk's start and to its end, all per channel. With m = beta y

    dP_ij = G_i . x_j    j <= i                  dL_ij = y_i . x_j    j < i
    dq_i = bef_i S G_i + sum_j dP_ij d_ij k_j    r_i = bef_i S y_i + sum_j dL_ij d_ij k_j
    de_i = -beta_i r_i                           dbeta_i = y_i . v_i - e_i . r_i
    dk_j = aft_j A x_j + sum_i d_ij (dP_ij q_i - beta_i dL_ij e_i)

With a write key, which stores v, the same lines hold for it and v in place of k and x; dq and r are
the sums of both, v has no part in dbeta, and its gradient comes from the recurrence in reverse.

A decay between two tokens is a product of factors (`linear_attention.sm90.intra_chunk`). The
gradient of log decays comes through each factor, an exponential of a sum of terms of one sign. Only
inside subchunks do terms cancel: those of the pairs on one side of a token. There a pair's term is
the same product of rounded numbers for its query and for its key, and sums over tokens are of two
bfloat16 numbers each.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries
from pallas_kernels.core.chunk_grid import (
  launch_per_chunk,
  own_token,
  shared_head,
  start_copies,
)
from pallas_kernels.core.wgmma import (
  COMPILER_PARAMS,
  TILE_WIDTH,
  Backend,
  Dots,
  broadcast_cols,
  broadcast_rows,
  causal_mask,
  load_col_vector,
  load_row_vector,
  load_scaled,
  load_tile,
  smem_tile,
  store_unoptimized,
  transpose_ref,
  with_int32_indices,
)
from pallas_kernels.delta_rule.config import REDUCTIONS
from pallas_kernels.delta_rule.sm90.channel_chunks import undo_own_decay
from pallas_kernels.linear_attention.sm90.intra_chunk import (
  AFTER,
  BEFORE,
  KEY,
  LARGEST_LOG2,
  LEVELS,
  DecayScratch,
  TokenDecayFactors,
  merged_pairs,
  subchunk_pairs,
  tokens_at,
)


class Tiles(NamedTuple):
  """Arrays, their GMEM references, or tiles."""

  q: Any  # [B, T, H, K] bfloat16; tiles [C, 64]
  k: Any  # [B, T, H, K] bfloat16
  erase_key: Any  # [B, T, H, K] bfloat16, or None for k
  d_out: Any  # [B, T, H, V] bfloat16: G; tiles [C, V]
  x: Any  # [B, H, N, V, C] bfloat16; tiles [V, C]
  y: Any  # [B, H, N, V, C] bfloat16
  write_key: Any = None  # [B, T, H, K] bfloat16, or None for k
  v: Any = None  # [B, T, H, V] bfloat16; a tile with a write key only


class Arrays(NamedTuple):
  """Arguments of `channel_gradients`, or their GMEM references."""

  tiles: Tiles
  v: Any  # [B, T, H, V] bfloat16
  states: Any  # [B, H, N, V, K] bfloat16: S
  adjoints: Any  # [B, H, N, V, K] bfloat16: A
  tables: Any  # [B, H, N, 1, C] float32: beta
  log_decay: Any  # [B, T, H, K] float32
  decay: Any  # [B, H, N, K] float32: of the state over the chunk, 0 where none passes
  documents: DocumentBoundaries


class Gradients(NamedTuple):
  """Results of `channel_gradients`."""

  q: Any  # [B, T, H, K] bfloat16
  k: Any  # [B, T, H, K] bfloat16
  erase_key: Any  # [B, T, H, K] bfloat16; None where k is the erase key: part of that of k
  v: Any  # [B, T, H, V] bfloat16; None, as `written`, with a write key
  written: Any  # [B, H, T] float32: y_i . v_i, of dbeta
  read: Any  # [B, H, K / 64, T] float32: e_i . r_i, in parts to be added up
  log_decay: Any  # [B, T, H, K] float32, or None
  write_key: Any = None  # [B, T, H, K] bfloat16, or None


class _Buffers(NamedTuple):
  tiles: Tiles
  state: Any  # [V, 64]: S, then A
  pairs: list  # of each key, [C, C]: dP, and above the diagonal dL transposed
  more: list  # [C, 64]: where the dead tiles are too few
  signs: Any  # [C, C]
  largest: Any  # [2 C] float32
  lhs: Any  # [4, C, C], of `Backend.to_lhs`
  arrived_barrier: Any  # of tiles, S, A, v


@with_int32_indices
def channel_gradients(
  arrays: Arrays,
  *,
  scale: float,
  decays: bool,
  erase_before_decay: bool,
  chunk: int,
  backend: Backend,
) -> Gradients:
  """Gradients of queries, keys, values, rates and, if `decays`, log decays."""
  (B, T, _, K), (_, _, H, V), C = arrays.tiles.k.shape, arrays.tiles.d_out.shape, chunk
  shared, writes = arrays.tiles.erase_key is None, arrays.tiles.write_key is not None
  arrays = arrays._replace(tiles=arrays.tiles._replace(v=arrays.v if writes else None))
  dead = (2 + writes) * V // TILE_WIDTH  # tiles of y and the state, and with a write key of G
  of_block, of_values = smem_tile(C, TILE_WIDTH), smem_tile(C, V)
  tiles = Tiles(
    q=of_block,
    k=of_block,
    erase_key=None if shared else of_block,
    d_out=of_values,
    x=smem_tile(V, C),
    y=smem_tile(V, C),
    write_key=of_block if writes else None,
    v=of_values if writes else None,
  )
  scratch = _Buffers(
    tiles=tiles,
    state=smem_tile(V, TILE_WIDTH),
    pairs=[smem_tile(C, C) for _ in range(1 + writes)],
    more=[of_block for _ in range(4 - dead)],
    signs=smem_tile(C, C),
    largest=plgpu.SMEM((2 * C,), jnp.float32),
    lhs=backend.lhs_scratch(4, C, C),
    arrived_barrier=plgpu.Barrier(num_barriers=len(tiles) + 3),
  )

  def body(at, gmem: Arrays, outs: Gradients, smem: _Buffers):
    _Chunk(at, gmem, outs, smem, H, scale, decays, erase_before_decay, backend).run()

  keys = jax.ShapeDtypeStruct((B, T, H, K), jnp.bfloat16)
  out_type = Gradients(
    q=keys,
    k=keys,
    erase_key=None if shared else keys,
    v=None if writes else jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16),
    written=None if writes else jax.ShapeDtypeStruct((B, H, T), jnp.float32),
    read=jax.ShapeDtypeStruct((B, H, K // TILE_WIDTH, T), jnp.float32),
    log_decay=jax.ShapeDtypeStruct((B, T, H, K), jnp.float32) if decays else None,
    write_key=keys if writes else None,
  )
  return launch_per_chunk(
    body,
    arrays,
    out_type,
    scratch,
    sizes=(K // TILE_WIDTH, T // C, H, B),
    chunk=C,
    name="delta_rule_channel_gradients",
    backend=backend,
    # Two CTAs share an SM's 228 KiB, of which each takes one more than it asks for.
    compiler_params=dataclasses.replace(COMPILER_PARAMS, reduction_scratch_bytes=REDUCTIONS),
  )


class _Key(NamedTuple):
  """A key that stores values, and its tiles."""

  key_smem: Any  # [C, 64]
  pairs_smem: Any  # [C, C]


class _OfQueries(NamedTuple):
  """Sums of terms over the pairs of each query; without `scale`."""

  q: Any  # [C, 64]
  read: Any  # [C, 64]: r
  log_decay: Any  # [C, 64], or None


class _OfKeys(NamedTuple):
  """Sums of terms over the pairs of each key; without `scale`."""

  keys: tuple  # [C, 64] of each key
  log_decay: Any  # [C, 64], or None


class _Chunk:
  """A chunk's block of 64 channels: first all that queries sum over, then all that keys do.

  One after the other, because the registers cannot hold all sums.
  """

  def __init__(self, at, gmem, outs, smem, heads, scale, decays, erase_before_decay, backend):
    self.at, self.gmem, self.outs, self.smem, self.backend = at, gmem, outs, smem, backend
    self.heads, self.scale, self.decays = heads, scale, decays
    self.erase_before_decay = erase_before_decay
    tiles = smem.tiles
    self.erase_smem = tiles.k if tiles.erase_key is None else tiles.erase_key
    self.shape = tiles.k.shape
    C = at.size
    present = [x for x in (tiles.k, tiles.write_key) if x is not None]
    self.keys = [_Key(*x) for x in zip(present, smem.pairs, strict=True)]
    rows = lambda ref: [ref.at[pl.ds(n, C)] for n in range(0, ref.shape[0], C)]
    cols = lambda ref: [ref.at[:, pl.ds(n, C)] for n in range(0, ref.shape[1], C)]
    writes = tiles.v is not None
    # What is dead when all products with values are done. Without a write key v takes G's place.
    free = (cols(tiles.d_out) if writes else []) + rows(tiles.y) + rows(smem.state) + smem.more
    self.log_decay_smem, self.work_smem = free[:2], free[2:4]
    self.stored_smem = [rows(tiles.x)[0]] + ([cols(tiles.v)[0]] if writes else [])  # x A, v A

  def _of_tokens(self, ref):
    return ref.at[self.at.batch, self.at.tokens, shared_head(self.at.head, self.heads, ref)]

  def _of_chunk(self, ref):
    return ref.at[self.at.batch, self.at.head, self.at.chunk]

  def run(self) -> None:
    """Computes and stores all."""
    at, gmem, smem, tiles, backend = self.at, self.gmem, self.smem, self.smem.tiles, self.backend
    copies = [x if x is None else self._of_tokens(x).at[:, at.channels] for x in gmem.tiles[:3]]
    copies.append(self._of_tokens(gmem.tiles.d_out))
    copies += [self._of_chunk(x) for x in (gmem.tiles.x, gmem.tiles.y)]
    if gmem.tiles.write_key is not None:
      copies.append(self._of_tokens(gmem.tiles.write_key).at[:, at.channels])
      copies.append(self._of_tokens(gmem.tiles.v))
    present = [(n, x) for n, x in enumerate(copies) if x is not None]
    for n, source in present:
      plgpu.copy_gmem_to_smem(source, tiles[n], smem.arrived_barrier.at[n])
    barriers = [smem.arrived_barrier.at[len(tiles) + n] for n in range(3)]
    of_state = lambda ref: self._of_chunk(ref).at[:, at.channels]
    plgpu.copy_gmem_to_smem(of_state(gmem.states), smem.state, barriers[0])
    table = gmem.tables.at[at.batch, shared_head(at.head, self.heads, gmem.tables, axis=1)]
    rate = load_row_vector(table.at[at.chunk, 0])
    self.document_states = gmem.documents.load_states(at)
    for n, _ in present:
      plgpu.barrier_wait(smem.arrived_barrier.at[n])
    plgpu.barrier_wait(barriers[0])
    own = self._store_pairs()
    y = transpose_ref(tiles.y)
    from_out, from_y = backend.dots(Dots([(tiles.d_out, smem.state)]), Dots([(y, smem.state)]))
    state: Any = plgpu.load(smem.state, layout=plgpu.Layout.WGMMA) if self.decays else None
    plgpu.commit_smem()
    plgpu.copy_gmem_to_smem(of_state(gmem.adjoints), smem.state, barriers[1])
    if tiles.v is None:
      plgpu.copy_gmem_to_smem(self._of_tokens(gmem.v), tiles.d_out, barriers[2])
    plgpu.barrier_wait(barriers[1])
    log_decay = self._of_total(state) if self.decays else None
    stored = [transpose_ref(tiles.x)] + ([tiles.v] if tiles.v is not None else [])
    stored = backend.dots(*(Dots([(x, smem.state)]) for x in stored))
    plgpu.commit_smem()  # all warps have read x and v
    for tile, x in zip(self.stored_smem, stored, strict=True):
      tile[...] = x.astype(jnp.bfloat16)
    if tiles.v is None:
      plgpu.barrier_wait(barriers[2])
      pl.when(at.block == 0)(lambda: self._value_gradient(y, rate))
      plgpu.commit_smem()  # all warps have read y
    rate = broadcast_rows(rate, self.shape)
    f = self._factors()
    own = [broadcast_rows(x, self.shape) for x in own]
    of_queries, signs = self._through_queries(f, from_out, from_y, log_decay, rate, own)
    d_erase = self._store_queries(of_queries, rate)
    self._store_keys(self._through_keys(f, signs, of_queries.log_decay, rate, own), d_erase)

  def _store_pairs(self):
    """dP and dL of each key; returns the diagonal of dP, [C] for each."""
    at, tiles, backend = self.at, self.smem.tiles, self.backend
    products = [Dots([(tiles.d_out, tiles.x)]), Dots([(transpose_ref(tiles.x), tiles.y)])]
    if tiles.v is not None:
      products += [Dots([(tiles.d_out, transpose_ref(tiles.v))]), Dots([(tiles.v, tiles.y)])]
    products = backend.dots(*products)
    lower, documents = causal_mask(at.size), self.gmem.documents
    diagonal, own = own_token((at.size, at.size)), []
    for n, key in enumerate(self.keys):
      own.append(jnp.sum(jnp.where(diagonal, products[2 * n], 0.0), axis=1))
      pairs = jnp.where(lower, products[2 * n], products[2 * n + 1])
      pairs = documents.mask_scores(at, pairs, self.document_states)
      key.pairs_smem[...] = pairs.astype(jnp.bfloat16)
    plgpu.commit_smem()
    return own

  def _of_total(self, state):
    """[C, 64]: of the log of the decay over the chunk, in every row; `smem.state` has A."""
    total = jnp.sum(state.astype(jnp.float32) * load_tile(self.smem.state), axis=0)
    decay = load_col_vector(self._of_chunk(self.gmem.decay).at[self.at.channels])
    return broadcast_cols(total * decay, self.shape)

  def _value_gradient(self, y, rate):
    """dv and its part of dbeta; v is where G was."""
    at, outs, v_smem = self.at, self.outs, self.smem.tiles.d_out
    y = load_tile(y)
    written = jnp.sum(y * load_tile(v_smem), axis=1)
    store_unoptimized(outs.written.at[at.batch, at.head, at.tokens], written)
    plgpu.commit_smem()
    v_smem[...] = (y * broadcast_rows(rate * self.scale, y.shape)).astype(jnp.bfloat16)
    start_copies([(v_smem, outs.v.at[at.batch, at.tokens, at.head])])

  def _factors(self) -> TokenDecayFactors:
    high_smem, low_smem = self.log_decay_smem
    decay = DecayScratch(high_smem, low_smem, self.smem.signs, self.smem.largest)
    log_decay = self._of_tokens(self.gmem.log_decay).at[:, self.at.channels]
    f = TokenDecayFactors(log_decay, decay, False, self.backend)
    if self.erase_before_decay:
      undo_own_decay(self.erase_smem, f)
    f.choose_level(LARGEST_LOG2)
    return f

  def _through_queries(self, f, from_out, from_y, log_decay, rate, own):
    """Of queries and the erase key, from the products of the entering state with G and y.

    Returns them and the signs of the last exponents.
    """
    C = self.at.size
    signs = f.signs(BEFORE)
    before = f.factor(signs)
    before = self.gmem.documents.select_seeing(self.at, self.document_states, before)
    d_q, read = from_out * before, from_y * before
    of_queries = load_tile(self.smem.tiles.q) * d_q
    of_erase = load_tile(self.erase_smem) * (-rate * read)
    log_decay = self._add_queries(log_decay, signs, of_queries, of_erase)
    for key, x in zip(self.keys, own, strict=True):
      d_q = d_q + x * load_tile(key.key_smem)

    def merge(level, sums):
      signs = f.signs(tokens_at(level))
      factor = f.factor(signs)
      mask = merged_pairs(C, tokens_at(level))
      return self._query_pairs(sums, signs, mask, factor, factor, rate)

    sums = lax.fori_loop(f.level, LEVELS, merge, _OfQueries(d_q, read, log_decay))
    left, right, signs = f.in_subchunk()
    mask = subchunk_pairs(C, f.level)
    return self._query_pairs(sums, signs, mask, left, right, rate, twice=True), signs

  def _query_pairs(self, sums: _OfQueries, signs, mask, left, right, rate, *, twice=False):
    """`sums` with the terms of the pairs of a mask, for factors of queries and of keys."""
    plgpu.commit_smem()  # all warps have read what was staged
    for key, scaled_smem in zip(self.keys, self.work_smem, strict=False):
      scaled_smem[...] = load_scaled(key.key_smem, right)
    plgpu.commit_smem()
    bits = _bits(mask)
    pairs = [(x.pairs_smem, y) for x, y in zip(self.keys, self.work_smem, strict=False)]
    d_scores = [(self._masked(x, bits, n), y) for n, (x, y) in enumerate(pairs)]
    (d_q,) = self.backend.dots(Dots(d_scores))
    d_lower = [(self._masked(transpose_ref(x), bits, n + 2), y) for n, (x, y) in enumerate(pairs)]
    (read,) = self.backend.dots(Dots(d_lower))
    # What keys are multiplied by in their turn, so that each pair's terms are the same numbers.
    of_queries = self._as_operand(self.smem.tiles.q, left) * d_q
    of_erase = self._as_operand(self.erase_smem, left * -rate) * read
    d_q, read = sums.q + d_q * left, sums.read + read * left
    log_decay = self._add_queries(sums.log_decay, signs, of_queries, of_erase, twice=twice)
    return _OfQueries(d_q, read, log_decay)

  def _add_queries(self, log_decay, signs, of_queries, of_erase, *, twice=False):
    """The gradient of log decays with those of the exponents of queries and of the erase key."""
    if not self.decays:
      return None
    if not self.erase_before_decay:
      rounded, _ = self._rounded(of_queries + of_erase, twice)
      return self._add_decays(log_decay, signs, rounded)
    # The erase key reads before the decay of its own token, which is counted with the others.
    of_queries, _ = self._rounded(of_queries, twice)
    of_erase, own = self._rounded(of_erase, twice)
    for tiles in (of_queries, of_erase) if twice else (of_queries + of_erase,):
      log_decay = self._add_decays(log_decay, signs, tiles)
    return log_decay - own

  def _rounded(self, d_log, twice=False):
    """A bfloat16 number, or two whose sum is nearly `d_log`, for what cancels; and that sum."""
    rounded = [self.backend.materialize(d_log.astype(jnp.bfloat16))]
    total = rounded[0].astype(jnp.float32)
    if twice:
      rounded.append((d_log - total).astype(jnp.bfloat16))
      total = total + rounded[1].astype(jnp.float32)
    return rounded, total

  def _add_decays(self, log_decay, signs, tiles):
    """The gradient of log decays with those of these exponents, one or two tiles."""
    plgpu.commit_smem()  # all warps have read what was there
    for tile, x in zip(self.work_smem, tiles, strict=False):
      tile[...] = x
    plgpu.commit_smem()
    counts = transpose_ref(signs.smem)
    pairs = [(counts, tile) for tile, _ in zip(self.work_smem, tiles, strict=False)]
    return self.backend.dots(Dots(pairs, log_decay))[0]

  def _store_queries(self, sums: _OfQueries, rate):
    """Stores gradients of queries, rates and an erase key; returns that of one that is k itself."""
    at, outs, scale = self.at, self.outs, self.scale
    read = jnp.sum(load_tile(self.erase_smem) * sums.read, axis=1)
    store_unoptimized(outs.read.at[at.batch, at.head, at.block, at.tokens], read)
    d_erase = -rate * sums.read
    if self.erase_before_decay:
      high_smem, low_smem = self.log_decay_smem
      d_erase = d_erase * jnp.exp2(-load_tile(high_smem) - load_tile(low_smem))
    results = [(sums.q, outs.q)]
    if outs.erase_key is not None:
      results.append((d_erase, outs.erase_key))
      d_erase = None
    plgpu.commit_smem()
    copies = []
    for tile, (value, out) in zip(self.work_smem, results, strict=False):
      tile[...] = (value * scale).astype(jnp.bfloat16)
      copies.append((tile, self._target(out)))
    start_copies(copies)
    return d_erase

  def _target(self, out):
    return out.at[self.at.batch, self.at.tokens, self.at.head, self.at.channels]

  def _through_keys(self, f, signs, log_decay, rate, own) -> _OfKeys:
    """Of the keys that store values, to be added to `log_decay`; `signs` are those in SMEM."""
    C, tiles = self.at.size, self.smem.tiles
    left, right, signs = f.in_subchunk(signs)
    signs, sums = f.signs(KEY, signs), _OfKeys((0.0, 0.0), log_decay)
    mask = subchunk_pairs(C, f.level, transposed=True)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # results of queries
    sums = self._key_pairs(sums, signs, mask, left, right, rate, twice=True)
    keys = (x + d * load_tile(tiles.q) for x, d in zip(sums.keys, own, strict=True))
    sums = sums._replace(keys=tuple(keys))

    def merge(level, sums):
      signs = f.signs(tokens_at(level))
      factor = f.factor(signs)
      mask = merged_pairs(C, tokens_at(level), transposed=True)
      return self._key_pairs(sums, signs, mask, factor, factor, rate)

    sums = lax.fori_loop(f.level, LEVELS, merge, sums)
    signs = f.signs(AFTER)
    after = f.factor(signs)
    after = self.gmem.documents.select_reaching(self.at, self.document_states, after)
    d_keys = [after * load_tile(x) for x in self.stored_smem]
    log_decay, keys = sums.log_decay, tuple(map(jnp.add, sums.keys, d_keys))
    if self.decays:
      of_keys = zip(self.keys, d_keys, strict=True)
      of_keys = sum(load_tile(key.key_smem) * d for key, d in of_keys)
      log_decay = self._add_decays(log_decay, signs, self._rounded(of_keys)[0])
    return _OfKeys(keys, log_decay)

  def _key_pairs(self, sums: _OfKeys, signs, mask, left, right, rate, *, twice=False):
    """`sums` with the terms of the pairs of a mask, for factors of queries and of keys."""
    q_smem, e_smem = self.work_smem
    plgpu.commit_smem()  # all warps have read what was staged
    q_smem[...] = load_scaled(self.smem.tiles.q, left)
    e_smem[...] = load_scaled(self.erase_smem, left * -rate)
    plgpu.commit_smem()
    bits, d_keys, of_keys = _bits(mask), [], None
    for n, key in enumerate(self.keys):
      d_scores = self._masked(transpose_ref(key.pairs_smem), bits, 2 * n)
      d_lower = self._masked(key.pairs_smem, bits, 2 * n + 1)
      (d_key,) = self.backend.dots(Dots([(d_scores, q_smem), (d_lower, e_smem)]))
      d_keys.append(sums.keys[n] + d_key * right)
      of_key = self._as_operand(key.key_smem, right) * d_key
      of_keys = of_key if of_keys is None else of_keys + of_key
    log_decay = sums.log_decay
    if self.decays:
      rounded, _ = self._rounded(-of_keys if signs.negative else of_keys, twice)
      log_decay = self._add_decays(log_decay, signs, rounded)
    return _OfKeys(tuple(d_keys), log_decay)

  def _as_operand(self, ref, factor):
    """A tile times `factor` as products read it, in float32."""
    return self.backend.materialize(load_scaled(ref, factor)).astype(jnp.float32)

  def _masked(self, pairs_smem, bits, number):
    """Some pairs as the left operand of a product."""
    pairs = plgpu.load(pairs_smem, layout=plgpu.Layout.WGMMA)
    pairs = lax.bitcast_convert_type(pairs, jnp.int16) & bits
    pairs = lax.bitcast_convert_type(pairs, jnp.bfloat16)
    return self.backend.to_lhs(pairs, self.smem.lhs, number)

  def _store_keys(self, sums: _OfKeys, d_erase) -> None:
    """`d_erase`: the gradient of an erase key that is k itself, or None."""
    outs, tiles, scale = self.outs, self.smem.tiles, self.scale
    if self.decays:
      store_unoptimized(self._target(outs.log_decay), sums.log_decay * scale)
    d_k, *d_write_key = sums.keys
    d_k = d_k if d_erase is None else d_k + d_erase
    results = [(tiles.k, d_k, outs.k)]
    results += [(tiles.write_key, x, outs.write_key) for x in d_write_key]
    plgpu.commit_smem()  # all warps have read the tiles
    for tile, value, _ in results:
      tile[...] = (value * scale).astype(jnp.bfloat16)
    start_copies([(tile, self._target(out)) for tile, _, out in results])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _bits(mask):
  """All bits of the bfloat16 numbers of a mask."""
  # The barrier keeps the compiler from a selection of single numbers.
  return lax.optimization_barrier(jnp.where(mask, jnp.int16(-1), jnp.int16(0)))

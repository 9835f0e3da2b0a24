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
gradient of log decays comes through each factor, which is an exponential of a sum of terms of one
sign: no difference of large numbers is taken, but inside subchunks that are chosen small.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries, select_rows
from pallas_kernels.core.chunk_grid import (
  broadcast_diagonal,
  launch_per_chunk,
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
from pallas_kernels.linear_attention.sm90.channel_backward import GRADIENT_LIMIT
from pallas_kernels.linear_attention.sm90.intra_chunk import (
  AFTER,
  BEFORE,
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
  state: Any  # [V, 64]: S, A, their products, then log decays
  pairs: tuple  # (dP, dL) of each key, [C, C]
  more: list  # [C, 64]: for V = 64, where the dead tiles are too few
  signs: Any  # [C, C]
  largest: Any  # [2 C] float32
  lhs: Any  # [8, C, V], of `Backend.to_lhs`
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
    pairs=((smem_tile(C, C), smem_tile(C, C)),) * (1 + writes),
    more=[of_block for _ in range(0 if V > TILE_WIDTH or writes else 2)],
    signs=smem_tile(C, C),
    largest=plgpu.SMEM((2 * C,), jnp.float32),
    lhs=backend.lhs_scratch(8, C, V),
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
    # Two CTAs share an SM, to the last KiB where there is a write key.
    compiler_params=dataclasses.replace(COMPILER_PARAMS, reduction_scratch_bytes=REDUCTIONS),
  )


class _Key(NamedTuple):
  """A key that stores values, and its tiles."""

  key_smem: Any  # [C, 64]
  pairs_smem: tuple  # dP and dL, [C, C]


class _Sums(NamedTuple):
  """Results of a chunk, which grow term by term; without `scale`."""

  q: Any  # [C, 64]
  keys: tuple  # [C, 64] of each key
  erase_key: Any  # [C, 64]
  read: Any  # [C]: e_i . r_i
  log_decay: Any  # [C, 64], or None


class _Chunk:
  """A chunk's block of 64 channels."""

  def __init__(self, at, gmem, outs, smem, heads, scale, decays, erase_before_decay, backend):
    self.at, self.gmem, self.outs, self.smem, self.backend = at, gmem, outs, smem, backend
    self.heads, self.scale, self.decays = heads, scale, decays
    self.erase_before_decay = erase_before_decay
    tiles = smem.tiles
    self.erase_smem = tiles.k if tiles.erase_key is None else tiles.erase_key
    self.shape = tiles.k.shape
    C = at.size
    rows = lambda ref: [ref.at[pl.ds(n * C, C)] for n in range(ref.shape[0] // C)]
    # What is dead when the products with values are done.
    free = [*rows(smem.state), *smem.more, *rows(tiles.x), *rows(tiles.y)]
    if tiles.v is not None:
      free += [tiles.v.at[:, pl.ds(0, TILE_WIDTH)], tiles.d_out.at[:, pl.ds(0, TILE_WIDTH)]]
    self.log_decay_smem = free[:2]
    self.q_smem, self.e_smem, self.k_smem = free[2:5]
    self.staging_smem = self.k_smem  # which is dead whenever it is used
    present = [x for x in (tiles.k, tiles.write_key) if x is not None]
    self.keys = [_Key(*x) for x in zip(present, smem.pairs, strict=True)]

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
    mask = gmem.documents.mask(at, causal_mask(at.size))
    strict = gmem.documents.mask(at, causal_mask(at.size, strict=True))
    for n, _ in present:
      plgpu.barrier_wait(smem.arrived_barrier.at[n])
    plgpu.barrier_wait(barriers[0])
    x, y = transpose_ref(tiles.x), transpose_ref(tiles.y)
    d_scores, d_lower, from_out, from_y = backend.dots(
      Dots([(tiles.d_out, tiles.x)]),
      Dots([(y, tiles.x)]),
      Dots([(tiles.d_out, smem.state)]),
      Dots([(y, smem.state)]),
    )
    d_pairs, stored = [(d_scores, d_lower)], [x]
    if tiles.v is not None:
      values = transpose_ref(tiles.v)
      d_pairs.append(backend.dots(Dots([(tiles.d_out, values)]), Dots([(y, values)])))
      stored.append(tiles.v)
    for (d_scores, d_lower), (scores_smem, lower_smem) in zip(d_pairs, smem.pairs, strict=True):
      scores_smem[...] = jnp.where(mask, d_scores, 0.0).astype(jnp.bfloat16)
      lower_smem[...] = jnp.where(strict, d_lower, 0.0).astype(jnp.bfloat16)
    state: Any = plgpu.load(smem.state, layout=plgpu.Layout.WGMMA) if self.decays else None
    plgpu.commit_smem()
    plgpu.copy_gmem_to_smem(of_state(gmem.adjoints), smem.state, barriers[1])
    if tiles.v is None:
      plgpu.copy_gmem_to_smem(self._of_tokens(gmem.v), tiles.d_out, barriers[2])
    plgpu.barrier_wait(barriers[1])
    from_stored = [backend.dot(x, smem.state) for x in stored]
    of_total = self._of_total(state) if self.decays else None
    if tiles.v is None:
      plgpu.barrier_wait(barriers[2])
      pl.when(at.block == 0)(lambda: self._value_gradient(y, rate))
    self._through_decays(from_out, from_y, from_stored, of_total, rate)

  def _of_total(self, state):
    """[C, 64]: of the log of the decay over the chunk, in every row; `smem.state` has A."""
    at, smem, backend = self.at, self.smem, self.backend
    products = state.astype(jnp.float32) * load_tile(smem.state)
    plgpu.commit_smem()
    smem.state[...] = products.astype(jnp.bfloat16)
    ones = plgpu.layout_cast(
      jnp.ones((at.size, smem.state.shape[0]), jnp.bfloat16), plgpu.Layout.WGMMA
    )
    ones = backend.to_lhs(ones, smem.lhs, 0)
    plgpu.commit_smem()
    total = backend.dot(ones, smem.state)
    decay = load_col_vector(self._of_chunk(self.gmem.decay).at[at.channels])
    return total * broadcast_cols(decay, total.shape)

  def _value_gradient(self, y, rate):
    """dv and its part of dbeta; v is where G was."""
    at, outs, v_smem = self.at, self.outs, self.smem.tiles.d_out
    y = load_tile(y)
    written = jnp.sum(y * load_tile(v_smem), axis=1)
    store_unoptimized(outs.written.at[at.batch, at.head, at.tokens], written)
    plgpu.commit_smem()
    v_smem[...] = (y * broadcast_rows(rate * self.scale, y.shape)).astype(jnp.bfloat16)
    start_copies([(v_smem, outs.v.at[at.batch, at.tokens, at.head])])

  def _through_decays(self, from_out, from_y, from_stored, of_total, rate):
    """All gradients but those of values, from the products of states with G, y and x (or v)."""
    at, smem, documents, backend = self.at, self.smem, self.gmem.documents, self.backend
    tiles, rate = smem.tiles, broadcast_rows(rate, self.shape)
    high_smem, low_smem = self.log_decay_smem
    decay = DecayScratch(high_smem, low_smem, smem.signs, smem.largest)
    log_decay = self._of_tokens(self.gmem.log_decay).at[:, at.channels]
    f = TokenDecayFactors(log_decay, decay, False, backend)
    if self.erase_before_decay:
      undo_own_decay(self.erase_smem, f)
    f.choose_level(GRADIENT_LIMIT if self.decays else LARGEST_LOG2)

    signs = f.signs(BEFORE)
    before = select_rows(documents.sees_entering_state(at), f.factor(signs))
    sums = _Sums(None, (), None, None, of_total)
    sums = self._read(sums, f, signs, from_out * before, from_y * before, rate)
    signs = f.signs(AFTER)
    after = select_rows(documents.reaches_leaving_state(at), f.factor(signs))
    sums = sums._replace(keys=tuple(after * x for x in from_stored))
    if self.decays:
      sums = self._add_decays(sums, f, signs, self._of_keys(sums.keys))
    for number, (key_smem, (d_scores_smem, _)) in enumerate(self.keys):
      own = broadcast_diagonal(load_tile(d_scores_smem), self.shape)
      d_keys = [*sums.keys]
      d_keys[number] = d_keys[number] + own * load_tile(tiles.q)
      sums = sums._replace(q=sums.q + own * load_tile(key_smem), keys=tuple(d_keys))

    left, right, signs = f.in_subchunk()
    mask = lambda **order: subchunk_pairs(at.size, f.level, **order)
    sums = self._through_pairs(sums, f, signs, mask, left, right, rate, same=False)

    def merge(level, sums):
      size = tokens_at(level)
      signs = f.signs(size)
      factor = f.factor(signs)
      mask = lambda **order: merged_pairs(at.size, size, **order)
      return self._through_pairs(sums, f, signs, mask, factor, factor, rate, same=True)

    sums = lax.fori_loop(f.level, LEVELS, merge, sums)
    self._store(sums)

  def _through_pairs(self, sums, f, signs, mask, left, right, rate, *, same):
    """`sums` with what comes from the pairs of a mask, for factors of queries and of keys.

    `same`: they are the same numbers, so that the signs of both exponents are one.
    """
    tiles, backend = self.smem.tiles, self.backend

    def operands(number, values):
      at = lambda x: (slice(None), pl.ds(0, x.shape[1]))
      return [backend.to_lhs(x, self.smem.lhs, number + n, *at(x)) for n, x in enumerate(values)]

    plgpu.commit_smem()
    self.q_smem[...] = load_scaled(tiles.q, left)
    self.e_smem[...] = load_scaled(self.erase_smem, left)
    chosen = mask()
    d_q = d_read = None
    for number, key in enumerate(self.keys):
      if number > 0:
        plgpu.commit_smem()  # all warps have read the last key
      self.k_smem[...] = load_scaled(key.key_smem, right)
      masked = [jnp.where(chosen, load_tile(x), 0.0) for x in key.pairs_smem]
      masked = operands(4 * number, masked)
      plgpu.commit_smem()
      d_q, d_read = backend.dots(
        Dots([(masked[0], self.k_smem)], d_q), Dots([(masked[1], self.k_smem)], d_read)
      )
    chosen = mask(transposed=True)
    d_keys = []
    for number, key in enumerate(self.keys):
      d_scores, d_lower = (
        jnp.where(chosen, load_tile(transpose_ref(x)), 0.0) for x in key.pairs_smem
      )
      d_lower = d_lower * broadcast_cols(-self._rates(), d_lower.shape)
      masked = operands(4 * number + 2, (d_scores, d_lower))
      plgpu.commit_smem()
      d_keys.append(backend.dots(Dots([(masked[0], self.q_smem), (masked[1], self.e_smem)]))[0])
    d_keys = [x * right for x in d_keys]
    of_keys = self._of_keys(d_keys) if self.decays else None
    of_keys = of_keys if same or of_keys is None else -of_keys
    sums = sums._replace(keys=tuple(map(jnp.add, sums.keys, d_keys)))
    return self._read(sums, f, signs, d_q * left, d_read * left, rate, of_keys)

  def _of_keys(self, d_keys):
    """[C, 64]: keys times their gradients, of all keys together."""
    return sum(load_tile(key.key_smem) * d for key, d in zip(self.keys, d_keys, strict=True))

  def _rates(self):
    """beta along the columns."""
    gmem, at = self.gmem, self.at
    table = gmem.tables.at[at.batch, shared_head(at.head, self.heads, gmem.tables, axis=1)]
    return load_col_vector(table.at[at.chunk, 0])

  def _read(self, sums: _Sums, f, signs, d_q, d_read, rate, of_exponents=None) -> _Sums:
    """`sums` with terms of dq and r, whose factors have the exponents of `signs`.

    `of_exponents`: what else these exponents contribute.
    """
    erase_keys = load_tile(self.erase_smem)
    read = jnp.sum(erase_keys * d_read, axis=1)
    d_e = -rate * d_read
    added = _Sums(d_q, (), d_e, read, None)
    sums = sums._replace(**{
      name: x if (total := getattr(sums, name)) is None else total + x
      for name, x in added._asdict().items() if name in ("q", "erase_key", "read")
    })  # fmt: skip
    if not self.decays:
      return sums
    d_log, d_log_erase = load_tile(self.smem.tiles.q) * d_q, erase_keys * d_e
    d_log = d_log if of_exponents is None else d_log + of_exponents
    if not self.erase_before_decay:
      return self._add_decays(sums, f, signs, d_log + d_log_erase)
    # The erase key reads before the decay of its own token, which is counted with the others.
    sums = self._add_decays(sums, f, signs, d_log)
    sums = self._add_decays(sums, f, signs, d_log_erase)
    return sums._replace(log_decay=sums.log_decay - load_tile(self.staging_smem))

  def _add_decays(self, sums: _Sums, f, signs, d_log) -> _Sums:
    plgpu.commit_smem()
    return sums._replace(
      log_decay=f.add_log_gradient(sums.log_decay, d_log, signs, self.staging_smem)
    )

  def _store(self, sums: _Sums) -> None:
    at, outs, tiles, scale = self.at, self.outs, self.smem.tiles, self.scale
    store_unoptimized(outs.read.at[at.batch, at.head, at.block, at.tokens], sums.read)
    target = lambda ref: ref.at[at.batch, at.tokens, at.head, at.channels]
    if self.decays:
      store_unoptimized(target(outs.log_decay), sums.log_decay * scale)
    d_e = sums.erase_key
    if self.erase_before_decay:
      high_smem, low_smem = self.log_decay_smem
      d_e = d_e * jnp.exp2(-load_tile(high_smem) - load_tile(low_smem))
    d_k, *d_write_key = sums.keys
    d_k = d_k + d_e if tiles.erase_key is None else d_k
    results = [(tiles.q, sums.q, outs.q), (tiles.k, d_k, outs.k)]
    if tiles.erase_key is not None:
      results.append((tiles.erase_key, d_e, outs.erase_key))
    results += [(tiles.write_key, x, outs.write_key) for x in d_write_key]
    plgpu.commit_smem()  # all warps have read the tiles
    for tile, value, _ in results:
      tile[...] = (value * scale).astype(jnp.bfloat16)
    start_copies([(tile, target(out)) for tile, _, out in results])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

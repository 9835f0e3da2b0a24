"""Gradients of softmax attention: the backward pass of `attention.op`.

With s the logits of query i and key j, p the weights exp(s_ij) / sum_j exp(s_ij), G the cotangent
of the outputs o, and d_i = G_i . o_i:

    ds_ij = p_ij (G_i . v_j - d_i)
    dq_i  = scale sum_j ds_ij k_j      dk_j = scale sum_i ds_ij q_i      dv_j = sum_i p_ij G_i

Where weights are dropped, their factors m_ij come with G_i . v_j and with the p_ij of dv.

The weights are computed again from the logarithms of the denominators (FlashAttention, Dao et al.
2022). Two kernels, each of which sums in registers, so that results repeat bit for bit: one has 128
queries per CTA and goes through the keys that they see, one has 128 keys and goes through the
queries that see them, of all heads that read them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.config import CONSUMERS, ROWS, TILE, LoopConfig
from pallas_kernels.attention.dropout import Dropout, mask
from pallas_kernels.attention.sm90.tiles import (
  KeyTiles,
  QueryLoop,
  QueryScratch,
  QueryTiles,
  Ring,
  launch,
  tile_start,
)
from pallas_kernels.attention.softmax import Dropped, load_range, steps_of, where_seen
from pallas_kernels.attention.types import Logits, Options, Outputs, Range, Ranges
from pallas_kernels.core.wgmma import (
  Backend,
  Dots,
  broadcast_cols,
  broadcast_rows,
  load_col_vector,
  load_row_vector,
  load_tile,
  smem_tile,
  store_unoptimized,
  traced_once,
  transpose_ref,
  zero_accumulator,
)


def backward(options: Options, q, k, v, ranges: Ranges, made: Outputs, d_out):
  """Gradients of q, k and v, and the products d_out . out [B, H, T]."""
  static = {"logits": options.logits, "backend": options.backend}
  config = options.config
  arrays = q, k, v, d_out, *made, ranges.seen, ranges.dropout
  by_q = query_gradient(*arrays, config=config.query_gradient, **static)
  arrays = q, k, v, d_out, made.log_sum, by_q.d_sum, ranges.seen_by, ranges.dropout
  of_keys = functools.partial(key_gradient, *arrays, config=config.key_gradient, **static)
  if config.separate_keys:
    d_k = of_keys(wanted=KeyGradients(k=True, v=False)).k
    d_v = of_keys(wanted=KeyGradients(k=False, v=True)).v
  else:
    d_k, d_v = of_keys(wanted=KeyGradients(k=True, v=True))
  return by_q.q, d_k, d_v, by_q.d_sum


class _QueryGmem(NamedTuple):
  q: Any
  keys: KeyTiles
  d_out: Any
  out: Any
  log_sum: Any
  seen: Range
  dropout: Dropout | None


class QueryGradient(NamedTuple):
  """Results of the kernel for queries."""

  q: Any  # [B, T, H, K] bfloat16: dq
  d_sum: Any  # [B, H, T] float32: d_out . out


@traced_once("logits", "config", "backend")
def query_gradient(
  q: jax.Array,  # [B, T, H, K] bfloat16
  k: jax.Array,  # [B, S, G, K] bfloat16
  v: jax.Array,  # [B, S, G, V] bfloat16
  d_out: jax.Array,  # [B, T, H, V] bfloat16
  out: jax.Array,  # [B, T, H, V] bfloat16
  log_sum: jax.Array,  # [B, H, T] float32, base 2
  seen: Range,  # [B, T] int32: the keys that each query sees
  dropout: Dropout | None,
  *,
  logits: Logits,
  config: LoopConfig,
  backend: Backend,
) -> QueryGradient:
  """dq, and the products that `key_gradient` needs, too."""
  (B, T, H, K), (G, V), shape = q.shape, v.shape[2:], (ROWS, config.tile)

  def body(warpgroup, gmem: _QueryGmem, outs: QueryGradient, smem: QueryScratch):
    loop = QueryLoop(gmem.seen, smem, config, QueryTiles(T // TILE, 1))
    ring, b, h = loop.ring, loop.batch, loop.head
    if warpgroup is None:
      loop.produce([gmem.q, gmem.d_out], gmem.keys, H // G)
      ring.drain(loop.after)
      return

    mine, own, rows = loop.rows_of(warpgroup)
    tokens = pl.ds(mine, ROWS)
    log_sum = load_row_vector(gmem.log_sum.at[b, h, tokens])
    # Read once, straight into registers, while the other tiles are on their way.
    out = plgpu.load(gmem.out.at[b, tokens, h], layout=plgpu.Layout.WGMMA, optimized=False)
    q_smem, d_out_smem = loop.own_tiles(warpgroup)
    d_sum = jnp.sum(load_tile(d_out_smem) * out.astype(jnp.float32), axis=1)
    store_unoptimized(outs.d_sum.at[b, h, tokens], d_sum)
    drops = Dropped.load(gmem.dropout, b, h, mine, logits.dropout)

    def advance(step, d_q):
      n = loop.number(step)
      slot = ring.slot(n)
      ring.wait("k", n)
      ring.wait("v", n)
      products, d_weights = backend.dots(
        Dots([(q_smem, transpose_ref(smem.keys.k.at[slot]))]),
        Dots([(d_out_smem, transpose_ref(smem.keys.v.at[slot]))]),
      )
      x, factor = logits.of(products)
      weights = jnp.exp2(x * factor - broadcast_rows(log_sum, shape))
      d_weights = d_weights if drops is None else drops.of(d_weights, step)
      d_logits = logits.slope(x, weights * (d_weights - broadcast_rows(d_sum, shape)))
      d_logits = where_seen(d_logits, 0.0, rows, own, step)
      lhs = backend.to_lhs(d_logits, smem.lhs, warpgroup)
      d_q = backend.dot(lhs, smem.keys.k.at[slot], start=d_q)
      ring.release(n)
      return d_q

    d_q = loop.consume(own, advance, zero_accumulator(ROWS, K))
    d_q_smem = q_smem  # q is dead: its last product is done
    d_q_smem[...] = (d_q * logits.scale).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(d_q_smem, outs.q.at[b, tokens, h])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  return launch(
    body,
    _QueryGmem(q, KeyTiles(k, v), d_out, out, log_sum, seen, dropout),
    QueryGradient(
      jax.ShapeDtypeStruct((B, T, H, K), jnp.bfloat16), jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    ),
    QueryScratch.of([K, V], k, v, config, backend),
    grid=(B, H, T // TILE),
    config=config,
    name="attention_query_gradient",
    backend=backend,
  )


class _KeyGmem(NamedTuple):
  q: Any
  k: Any
  v: Any
  d_out: Any
  log_sum: Any
  d_sum: Any
  seen_by: Range
  dropout: Any  # a `Dropout` or None


class KeyGradients(NamedTuple):
  """Gradients of keys and values."""

  k: Any  # [B, S, G, K] bfloat16
  v: Any  # [B, S, G, V] bfloat16


class _QueryTiles(NamedTuple):
  q: Any  # [stages, tile, K]
  d_out: Any  # [stages, tile, V]
  log_sum: Any  # [stages, tile]
  d_sum: Any  # [stages, tile]


class _Loaded(NamedTuple):
  all: Any


class _KeyScratch(NamedTuple):
  k: Any  # [128, K]
  v: Any  # [128, V]
  stages: _QueryTiles
  lhs: KeyGradients
  own_loaded: Any
  loaded: _Loaded
  consumed: Any


@traced_once("wanted", "logits", "config", "backend")
def key_gradient(
  q: jax.Array,  # [B, T, H, K] bfloat16
  k: jax.Array,  # [B, S, G, K] bfloat16
  v: jax.Array,  # [B, S, G, V] bfloat16
  d_out: jax.Array,  # [B, T, H, V] bfloat16
  log_sum: jax.Array,  # [B, H, T] float32, base 2
  d_sum: jax.Array,  # [B, H, T] float32: d_out . out
  seen_by: Range,  # [B, S] int32: the queries that see each key
  dropout: Dropout | None,
  *,
  wanted: KeyGradients,  # of booleans
  logits: Logits,
  config: LoopConfig,
  backend: Backend,
) -> KeyGradients:
  """dk and dv, summed over the heads that share a key; those that are not wanted are None.

  Wide heads are faster in two calls, as the registers do not hold both sums.
  """
  (B, _, H, K), (S, G, V) = q.shape, v.shape[1:]
  stages, tile, shape = config.num_stages, config.tile, (ROWS, config.tile)
  vector = plgpu.SMEM((stages, tile), jnp.float32)
  scratch = _KeyScratch(
    k=smem_tile(TILE, K),
    v=smem_tile(TILE, V),
    stages=_QueryTiles(smem_tile(stages, tile, K), smem_tile(stages, tile, V), vector, vector),
    lhs=KeyGradients(*[backend.lhs_scratch(CONSUMERS, *shape)] * 2),
    own_loaded=plgpu.Barrier(num_arrivals=2),
    loaded=_Loaded(plgpu.Barrier(num_arrivals=4, num_barriers=stages)),
    consumed=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
  )

  def of_wanted(results):
    """`KeyGradients` of what there is of the wanted ones."""
    rest = iter(results)
    return KeyGradients(*(next(rest) if want else None for want in wanted))

  def body(warpgroup, gmem: _KeyGmem, outs: KeyGradients, smem: _KeyScratch):
    b, g = lax.axis_index("row"), lax.axis_index("head")
    start = tile_start(lax.axis_index("tile"))  # with causal masks the first have most to do
    ring = Ring(stages, smem.loaded, smem.consumed)
    steps = steps_of(gmem.seen_by, b, start, TILE, tile)
    width = steps.end - steps.begin  # steps of a head

    if warpgroup is None:
      tokens = pl.ds(start, TILE)
      plgpu.copy_gmem_to_smem(gmem.k.at[b, tokens, g], smem.k, smem.own_loaded)
      plgpu.copy_gmem_to_smem(gmem.v.at[b, tokens, g], smem.v, smem.own_loaded)

      def load(n):
        slot, h = ring.slot(n), g * (H // G) + lax.div(n, width)
        queries = pl.ds((steps.begin + lax.rem(n, width)) * tile, tile)
        sources = _QueryTiles(
          gmem.q.at[b, queries, h],
          gmem.d_out.at[b, queries, h],
          gmem.log_sum.at[b, h, queries],
          gmem.d_sum.at[b, h, queries],
        )
        for source, target in zip(sources, smem.stages, strict=True):
          plgpu.copy_gmem_to_smem(source, target.at[slot], ring.loaded.all.at[slot])

      ring.produce(width * (H // G), load)
      ring.drain(width * (H // G))
      return

    mine = start + warpgroup * ROWS
    own = steps_of(gmem.seen_by, b, mine, ROWS, tile)
    rows = load_range(gmem.seen_by, b, mine)
    position = None
    if gmem.dropout is not None:
      position = load_row_vector(gmem.dropout.position.at[b, pl.ds(mine, ROWS)])
    in_tile = pl.ds(warpgroup * ROWS, ROWS)
    k_smem, v_smem = smem.k.at[in_tile], smem.v.at[in_tile]
    plgpu.barrier_wait(smem.own_loaded)

    def of_head(head, carry):
      number = lambda step: head * width + step - steps.begin

      def advance(step, carry):
        n = number(step)
        slot = ring.slot(n)
        ring.wait("all", n)
        stage = _QueryTiles(*(x.at[slot] for x in smem.stages))
        products, *d_weights = backend.dots(
          Dots([(k_smem, transpose_ref(stage.q))]),
          *[Dots([(v_smem, transpose_ref(stage.d_out))])] * wanted.k,
        )
        log_sum = load_col_vector(stage.log_sum)
        x, factor = logits.of(products)
        weights = jnp.exp2(x * factor - broadcast_cols(log_sum, shape))
        weights = where_seen(weights, 0.0, rows, own, step)
        drop = lambda x: x
        if position is not None:
          queries = pl.ds(step * tile, tile)
          words = (x.at[b, g * (H // G) + head, queries] for x in gmem.dropout.words)
          words = tuple(broadcast_cols(load_col_vector(x), shape) for x in words)
          drop = mask(words, broadcast_rows(position, shape), logits.dropout)
        left = KeyGradients(None, drop(weights))
        if wanted.k:
          d_sum = broadcast_cols(load_col_vector(stage.d_sum), shape)
          d_logits = logits.slope(x, weights * (drop(d_weights[0]) - d_sum))
          left = left._replace(k=d_logits)
        sums = (
          Dots([(backend.to_lhs(value, scratch, warpgroup), right)], start=start)
          for want, value, scratch, right, start in zip(
            wanted, left, smem.lhs, (stage.q, stage.d_out), of_wanted(carry), strict=True
          )
          if want
        )
        carry = backend.dots(*sums)
        ring.release(n)
        return carry

      return ring.consume(steps, own, number, advance, carry)

    widths = (width for width, want in zip((K, V), wanted, strict=True) if want)
    carry = tuple(zero_accumulator(ROWS, width) for width in widths)
    carry = of_head(0, carry) if H == G else lax.fori_loop(0, H // G, of_head, carry)
    tokens = pl.ds(mine, ROWS)
    # Keys and values are dead: their last products are done.
    targets = zip(of_wanted(carry), (k_smem, v_smem), (logits.scale, 1.0), outs, strict=True)
    for value, target, factor, gmem_ref in targets:
      if value is not None:
        target[...] = (value * factor if factor != 1.0 else value).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(target, gmem_ref.at[b, tokens, g])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  return launch(
    body,
    _KeyGmem(q, k, v, d_out, log_sum, d_sum, seen_by, dropout),
    KeyGradients(
      jax.ShapeDtypeStruct((B, S, G, K), jnp.bfloat16) if wanted.k else None,
      jax.ShapeDtypeStruct((B, S, G, V), jnp.bfloat16) if wanted.v else None,
    ),
    scratch,
    grid=(B, G, S // TILE),
    config=config,
    name="attention_key_gradient",
    backend=backend,
  )

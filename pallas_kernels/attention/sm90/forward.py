"""Outputs of softmax attention: the forward pass of `attention.op`.

A CTA has 128 queries of a head, 64 for each of its two consumer warpgroups, and goes through the
tiles of keys that any of them sees. The softmax is accumulated with running maxima and sums
(Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022); while one warpgroup computes
exponentials the other one multiplies.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.config import ROWS, TILE, LoopConfig
from pallas_kernels.attention.sm90.tiles import (
  KeyTiles,
  QueryLoop,
  QueryScratch,
  launch,
  visible,
)
from pallas_kernels.attention.types import LOWEST, Logits, Options, Range, Ranges
from pallas_kernels.core.wgmma import (
  ROW_LAYOUT,
  Backend,
  broadcast_rows,
  smem_tile,
  store_unoptimized,
  traced_once,
  transpose_ref,
  zero_accumulator,
)


class _Gmem(NamedTuple):
  q: Any
  keys: KeyTiles
  seen: Range


class Outputs(NamedTuple):
  """Results of the kernel."""

  out: Any  # [B, T, H, V] bfloat16
  log_sum: Any  # [B, H, T] float32: the logarithm in base 2 of the softmax's denominator


def forward(options: Options, q, k, v, ranges: Ranges) -> Outputs:
  """Outputs, and what the backward pass needs of this one."""
  static = {"logits": options.logits, "backend": options.backend}
  return outputs(q, k, v, ranges.seen, config=options.config.forward, **static)


@traced_once("logits", "config", "backend")
def outputs(
  q: jax.Array,  # [B, T, H, K] bfloat16, T a multiple of 128
  k: jax.Array,  # [B, S, G, K] bfloat16, S a multiple of 128
  v: jax.Array,  # [B, S, G, V] bfloat16
  seen: Range,  # [B, T] int32: the keys that each query sees
  *,
  logits: Logits,
  config: LoopConfig,
  backend: Backend,
) -> Outputs:
  """Outputs, 0 for queries that see no key, and logarithms of denominators."""
  (B, T, H, K), (G, V), shape = q.shape, v.shape[2:], (ROWS, config.tile)
  # Queries are dead when outputs are stored; where the two are not alike, a tile of its own.
  out_tile = None if K == V else smem_tile(TILE, V)

  def body(warpgroup, gmem: _Gmem, outs: Outputs, smem: QueryScratch):
    loop = QueryLoop(gmem.seen, smem, config, T)
    ring, b, h = loop.ring, loop.batch, loop.head
    if warpgroup is None:
      loop.produce([gmem.q], gmem.keys, H // G)
      return

    mine, own, rows = loop.rows_of(warpgroup)
    (q_smem,) = loop.own_tiles(warpgroup)
    plgpu.barrier_wait(smem.own_loaded)

    def advance(step, carry):
      acc, top, total = carry
      n = loop.number(step)
      slot = ring.slot(n)
      ring.wait("k", n)
      x, factor = logits.of(backend.dot(q_smem, transpose_ref(smem.keys.k.at[slot])))
      masked = (step < own.inside) | (step >= own.outside)
      x = lax.cond(masked, lambda: jnp.where(visible(rows, step, shape), x, -jnp.inf), lambda: x)
      higher = jnp.maximum(top, jnp.max(x, axis=1) * factor)
      weights = jnp.exp2(x * factor - broadcast_rows(higher, shape))
      shrink = jnp.exp2(top - higher)
      total = total * shrink + jnp.sum(weights, axis=1)
      acc = acc * broadcast_rows(shrink, acc.shape)
      lhs = backend.to_lhs(weights, smem.lhs, warpgroup)
      ring.wait("v", n)
      acc = backend.dot(lhs, smem.keys.v.at[slot], start=acc)
      ring.release(n)
      return acc, higher, total

    constant = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW_LAYOUT)
    carry = zero_accumulator(ROWS, V), constant(LOWEST), constant(0.0)
    acc, top, total = loop.consume(own, advance, carry)

    some = total > 0.0
    inverse = jnp.where(some, 1.0 / jnp.where(some, total, 1.0), 0.0)
    out_smem = smem.own[0] if smem.out is None else smem.out
    out_smem = out_smem.at[pl.ds(warpgroup * ROWS, ROWS)]
    out_smem[...] = (acc * broadcast_rows(inverse, acc.shape)).astype(jnp.bfloat16)
    log_sum = jnp.where(some, top + jnp.log2(jnp.where(some, total, 1.0)), 0.0)
    store_unoptimized(outs.log_sum.at[b, h, pl.ds(mine, ROWS)], log_sum)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, outs.out.at[b, pl.ds(mine, ROWS), h])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  out_type = Outputs(
    jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16), jax.ShapeDtypeStruct((B, H, T), jnp.float32)
  )
  return launch(
    body,
    _Gmem(q, KeyTiles(k, v), seen),
    out_type,
    QueryScratch.of([K], k, v, config, backend, out_tile),
    grid=(B, H, T // TILE),
    config=config,
    name="attention_outputs",
    backend=backend,
  )

"""Outputs of softmax attention: the forward pass of `attention.op`.

A CTA has tiles of 128 queries of a head, 64 for each of its two consumer warpgroups, one tile after
another, and goes through the tiles of keys that any of these queries sees. The softmax is
accumulated with running maxima and sums (Milakov and Gimelshein 2018; FlashAttention, Dao et al.
2022). The products of a step's queries and keys are issued together with those of the weights and
values of the step before, which run while the weights of this step are computed (FlashAttention-3,
Shah et al. 2024, section 3.2); while one warpgroup computes exponentials the other one multiplies.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.config import ROWS, TILE, ForwardConfig
from pallas_kernels.attention.dropout import Dropout
from pallas_kernels.attention.sm90.tiles import (
  KeyTiles,
  QueryLoop,
  QueryScratch,
  QueryTiles,
  Ring,
  launch,
)
from pallas_kernels.attention.softmax import Dropped, Softmax, Steps, where_seen
from pallas_kernels.attention.types import Logits, Options, Outputs, Range, Ranges
from pallas_kernels.core.wgmma import (
  Backend,
  Dots,
  Ref,
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
  dropout: Dropout | None


def forward(options: Options, q, k, v, ranges: Ranges) -> Outputs:
  """Outputs, and what the backward pass needs of this one."""
  static = {"logits": options.logits, "backend": options.backend}
  return outputs(q, k, v, ranges.seen, ranges.dropout, config=options.config.forward, **static)


@traced_once("logits", "config", "backend")
def outputs(
  q: jax.Array,  # [B, T, H, K] bfloat16, T a multiple of 128
  k: jax.Array,  # [B, S, G, K] bfloat16, S a multiple of 128
  v: jax.Array,  # [B, S, G, V] bfloat16
  seen: Range,  # [B, T] int32: the keys that each query sees
  dropout: Dropout | None,
  *,
  logits: Logits,
  config: ForwardConfig,
  backend: Backend,
) -> Outputs:
  """Outputs, 0 for queries that see no key, and logarithms of denominators."""
  (B, T, H, K), (G, V) = q.shape, v.shape[2:]
  # Queries are dead when outputs are stored; where the two are not alike, tiles of their own.
  out_tiles = None if K == V else smem_tile(config.query_tiles, TILE, V)
  tiles = QueryTiles(T // TILE, config.query_tiles)

  def body(warpgroup, gmem: _Gmem, outs: Outputs, smem: QueryScratch):
    of_tile = lambda place, before: QueryLoop(gmem.seen, smem, config, tiles, place, before)
    if warpgroup is None:

      def produce(place, before):
        loop = of_tile(place, before)
        loop.produce([gmem.q], gmem.keys, H // G)
        return loop.after

      Ring(config.num_stages, smem.loaded, smem.consumed).drain(tiles.for_each(produce))
      return

    def compute(place, before):
      loop = of_tile(place, before)
      mine, own, rows = loop.rows_of(warpgroup)
      (q_smem,) = loop.own_tiles(warpgroup)
      drops = Dropped.load(gmem.dropout, loop.batch, loop.head, mine, logits.dropout)
      consumer = _Consumer(loop, own, rows, q_smem, warpgroup, logits, drops, backend, (ROWS, V))
      softmax = consumer.run()
      inverse, log_sum = softmax.end()
      out_smem = q_smem if smem.out is None else smem.out.at[place, pl.ds(warpgroup * ROWS, ROWS)]
      out_smem[...] = (softmax.value * broadcast_rows(inverse, (ROWS, V))).astype(jnp.bfloat16)
      tokens = pl.ds(mine, ROWS)
      store_unoptimized(outs.log_sum.at[loop.batch, loop.head, tokens], log_sum)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(out_smem, outs.out.at[loop.batch, tokens, loop.head])
      return loop.after

    tiles.for_each(compute)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  out_type = Outputs(
    jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16), jax.ShapeDtypeStruct((B, H, T), jnp.float32)
  )
  return launch(
    body,
    _Gmem(q, KeyTiles(k, v), seen, dropout),
    out_type,
    QueryScratch.of([K], k, v, config, backend, out_tiles, config.query_tiles),
    grid=(B, H, tiles.ctas),
    config=config,
    name="attention_outputs",
    backend=backend,
  )


class _Consumer(NamedTuple):
  """A consumer warpgroup's work on its rows of a tile of queries."""

  loop: QueryLoop
  own: Steps
  rows: Range
  q_smem: Ref  # [64, K]
  warpgroup: jax.Array
  logits: Logits
  drops: Dropped | None
  backend: Backend
  shape: tuple[int, int]  # of the outputs

  def run(self) -> Softmax:
    """The softmax over all visible keys."""
    loop, own = self.loop, self.own
    start = Softmax.empty(zero_accumulator(*self.shape))
    loop.ring.skip(loop.steps.begin, own.begin, loop.number)
    some = (own.end > own.begin).astype(jnp.int32)
    softmax = lax.fori_loop(0, some, lambda _, softmax: self._all_steps(softmax), start)
    loop.ring.skip(own.end, loop.steps.end, loop.number)
    return softmax

  def _all_steps(self, softmax: Softmax) -> Softmax:
    own, ring = self.own, self.loop.ring
    n = self.loop.number(own.begin)
    ring.wait("k", n)
    scores = self.backend.dot(*self._scores(n))
    top, total, _, weights = self._advance(softmax, own.begin, scores)
    carry = softmax._replace(top=top, total=total), weights.astype(jnp.bfloat16)
    softmax, weights = lax.fori_loop(own.begin + 1, own.end, self._step, carry)
    n = self.loop.number(own.end - 1)
    value = self.backend.dot(*self._values(weights, n), start=softmax.value)
    ring.release(n)
    return softmax._replace(value=value)

  def _step(self, step, carry: tuple[Softmax, jax.Array]) -> tuple[Softmax, jax.Array]:
    """Scores and weights of a step, and the product of the weights and values before it."""
    softmax, weights = carry
    n = self.loop.number(step)
    self.loop.ring.wait("k", n)
    (top, total, shrink, weights), value = self.backend.staggered(
      Dots([self._scores(n)]),
      Dots([self._values(weights, n - 1)], softmax.value),
      lambda scores: self._advance(softmax, step, scores),
    )
    self.loop.ring.release(n - 1)
    value = value * broadcast_rows(shrink, self.shape)
    return Softmax(value, top, total), weights.astype(jnp.bfloat16)

  def _scores(self, n) -> tuple[Ref, Ref]:
    """The operands of the scores of the n-th step."""
    return self.q_smem, transpose_ref(self.loop.smem.keys.k.at[self.loop.ring.slot(n)])

  def _values(self, weights, n) -> tuple[Any, Ref]:
    """The operands of the sum of values of the n-th step."""
    lhs = self.backend.to_lhs(weights, self.loop.smem.lhs, self.warpgroup)
    return lhs, self.loop.smem.keys.v.at[self.loop.ring.slot(n)]

  def _advance(self, softmax: Softmax, step, scores):
    """(top, total, what the sums so far shrink by, weights), once the step's values are there."""
    x, factor = self.logits.of(scores)
    x = where_seen(x, -jnp.inf, self.rows, self.own, step)
    *sums, weights = softmax.advance(x, factor)
    weights = weights if self.drops is None else self.drops.of(weights, step)
    made = lax.optimization_barrier((*sums, weights))
    self.loop.ring.wait("v", self.loop.number(step))
    return made

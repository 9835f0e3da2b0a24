"""Softmax attention on every NVIDIA GPU since Ampere: outputs, gradients of queries, of keys.

The formulas are those of `sm90/forward.py` and `sm90/backward.py`. A CTA is one warpgroup. It has
64 tokens of one side in SMEM, and goes through the tiles of 64 tokens of the other that any of
its own sees. A tile is on its way to registers while the product before its own runs; keys and
values of a step are in the same SMEM, one after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.config import ROWS
from pallas_kernels.attention.softmax import Softmax, load_range, steps_of, where_seen
from pallas_kernels.attention.types import Logits, Options, Outputs, Range, Ranges
from pallas_kernels.core.mma import Mma, blocks_of, fetch_tile, load_tiles, store_tile
from pallas_kernels.core.wgmma import (
  COMPILER_PARAMS,
  Dots,
  Ref,
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

C = ROWS  # tokens of a tile, on both sides


def forward(options: Options, q, k, v, ranges: Ranges) -> Outputs:
  """Outputs, and what the backward pass needs of this one."""
  backend = Mma(options.interpret)
  return outputs(q, k, v, ranges.seen, logits=options.logits, backend=backend)


def backward(options: Options, q, k, v, ranges: Ranges, made: Outputs, d_out):
  """Gradients of q, k and v, and the products d_out . out [B, H, T]."""
  static = {"logits": options.logits, "backend": Mma(options.interpret)}
  d_q, d_sum = query_gradient(q, k, v, d_out, made, ranges.seen, **static)
  d_k, d_v = key_gradient(q, k, v, d_out, made.log_sum, d_sum, ranges.seen_by, **static)
  return d_q, d_k, d_v, d_sum


class _Gmem(NamedTuple):
  """Arrays of the kernels, or their GMEM references; None for those that a kernel does not read."""

  q: Any  # [B, T, H, K] bfloat16
  k: Any  # [B, S, G, K] bfloat16
  v: Any  # [B, S, G, V] bfloat16
  bounds: Range  # of the tokens that a CTA has
  d_out: Any = None  # [B, T, H, V] bfloat16
  out: Any = None  # [B, T, H, V] bfloat16
  log_sum: Any = None  # [B, H, T] float32, base 2
  d_sum: Any = None  # [B, H, T] float32: d_out . out


class _Smem(NamedTuple):
  own: tuple  # tiles [C, K] and [C, V] of the CTA's tokens; for outputs the first alone
  step: tuple  # those of a step; in the kernels for queries one, for keys and then for values
  weights: Any  # [C, C]: the left operand of the last products


@traced_once("logits", "backend")
def outputs(
  q: jax.Array, k: jax.Array, v: jax.Array, seen: Range, *, logits: Logits, backend: Mma
) -> Outputs:
  """Outputs, 0 for queries that see no key, and logarithms of denominators."""
  (B, T, H, K), (G, V) = q.shape, v.shape[2:]

  def body(gmem: _Gmem, outs: Outputs, smem: _Smem):
    at = _Queries(gmem, H // G)
    (q_smem,), (k_smem, v_smem) = smem.own, _views(smem.step, K, V)
    load_tiles((gmem.q.at[at.own], q_smem))

    def advance(step, carry):
      softmax, keys = carry
      k_smem[...] = keys
      values = fetch_tile(gmem.v.at[at.keys(step)])
      x, factor = logits.of(_products(backend, q_smem, k_smem))
      x = where_seen(x, -jnp.inf, at.rows, at.steps, step)
      top, total, shrink, weights = softmax.advance(x, factor)
      smem.weights[...] = weights.astype(jnp.bfloat16)
      v_smem[...] = values
      keys = fetch_tile(gmem.k.at[at.keys(step + 1)])
      shrink = broadcast_rows(shrink, (C, C))
      value = _sums(backend, smem.weights, v_smem, [x * shrink for x in softmax.value])
      return Softmax(value, top, total), keys

    start = Softmax.empty(_zeros(V)), fetch_tile(gmem.k.at[at.keys(at.steps.begin)])
    softmax, _ = lax.fori_loop(at.steps.begin, at.steps.end, advance, start)
    inverse, log_sum = softmax.end()
    store_unoptimized(outs.log_sum.at[at.batch, at.head, at.tokens], log_sum)
    inverse = broadcast_rows(inverse, (C, C))
    _store(outs.out.at[at.own], [x * inverse for x in softmax.value], smem.weights)

  return _launch(
    body,
    _Gmem(q, k, v, seen),
    Outputs(
      jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16), jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    ),
    _Smem((smem_tile(C, K),), (smem_tile(C, max(K, V)),), smem_tile(C, C)),
    grid=(B, H, T // C),
    name="outputs",
    backend=backend,
  )


@traced_once("logits", "backend")
def query_gradient(
  q, k, v, d_out, made: Outputs, seen: Range, *, logits: Logits, backend: Mma
) -> tuple[jax.Array, jax.Array]:
  """dq [B, T, H, K] bfloat16 and the products d_out . out [B, H, T] float32."""
  (B, T, H, K), (G, V) = q.shape, v.shape[2:]

  def body(gmem: _Gmem, outs, smem: _Smem):
    at = _Queries(gmem, H // G)
    (q_smem, d_out_smem), (k_smem, v_smem) = smem.own, _views(smem.step, K, V)
    load_tiles((gmem.q.at[at.own], q_smem), (gmem.d_out.at[at.own], d_out_smem))
    out = plgpu.load(gmem.out.at[at.own], layout=plgpu.Layout.WGMMA, optimized=False)
    d_sum = jnp.sum(load_tile(d_out_smem) * out.astype(jnp.float32), axis=1)
    numbers = at.batch, at.head, at.tokens
    store_unoptimized(outs[1].at[numbers], d_sum)
    d_sum = broadcast_rows(d_sum, (C, C))
    log_sum = broadcast_rows(load_row_vector(gmem.log_sum.at[numbers]), (C, C))

    def advance(step, carry):
      d_q, values = carry
      v_smem[...] = values
      keys = fetch_tile(gmem.k.at[at.keys(step)])
      d_weights = _products(backend, d_out_smem, v_smem)
      k_smem[...] = keys
      values = fetch_tile(gmem.v.at[at.keys(step + 1)])
      x, factor = logits.of(_products(backend, q_smem, k_smem))
      d_logits = logits.slope(x, jnp.exp2(x * factor - log_sum) * (d_weights - d_sum))
      d_logits = where_seen(d_logits, 0.0, at.rows, at.steps, step)
      smem.weights[...] = d_logits.astype(jnp.bfloat16)
      return _sums(backend, smem.weights, k_smem, d_q), values

    start = _zeros(K), fetch_tile(gmem.v.at[at.keys(at.steps.begin)])
    d_q, _ = lax.fori_loop(at.steps.begin, at.steps.end, advance, start)
    _store(outs[0].at[at.own], [x * logits.scale for x in d_q], smem.weights)

  return _launch(
    body,
    _Gmem(q, k, v, seen, d_out, *made),
    (
      jax.ShapeDtypeStruct((B, T, H, K), jnp.bfloat16),
      jax.ShapeDtypeStruct((B, H, T), jnp.float32),
    ),
    _Smem((smem_tile(C, K), smem_tile(C, V)), (smem_tile(C, max(K, V)),), smem_tile(C, C)),
    grid=(B, H, T // C),
    name="query_gradient",
    backend=backend,
  )


@traced_once("logits", "backend")
def key_gradient(
  q, k, v, d_out, log_sum, d_sum, seen_by: Range, *, logits: Logits, backend: Mma
) -> tuple[jax.Array, jax.Array]:
  """dk [B, S, G, K] and dv [B, S, G, V] bfloat16, summed over the heads that share a key."""
  (B, T, H, K), (S, G, V) = q.shape, v.shape[1:]

  def body(gmem: _Gmem, outs, smem: _Smem):
    b, g = lax.axis_index("row"), lax.axis_index("head")
    start = lax.axis_index("tile") * C  # with causal masks the first have most to do
    own = b, pl.ds(start, C), g
    steps, rows = steps_of(gmem.bounds, b, start, C, C), load_range(gmem.bounds, b, start)
    per_head = steps.end - steps.begin
    (k_smem, v_smem), (q_smem, d_out_smem) = smem.own, smem.step
    load_tiles((gmem.k.at[own], k_smem), (gmem.v.at[own], v_smem))

    def place(n):
      """(head, step) of the n-th step of all heads, the last where there is none."""
      head = jnp.minimum(lax.div(n, jnp.maximum(per_head, 1)), H // G - 1)
      return g * (H // G) + head, jnp.minimum(steps.begin + n - head * per_head, T // C - 1)

    def queries_of(x, n):
      head, step = place(n)
      return fetch_tile(x.at[b, pl.ds(step * C, C), head])

    def advance(n, carry):
      d_k, d_v, queries = carry
      head, step = place(n)
      numbers = b, head, pl.ds(step * C, C)
      q_smem[...] = queries
      d_outs = queries_of(gmem.d_out, n)
      log_sum, d_sum = (
        broadcast_cols(load_col_vector(x.at[numbers]), (C, C)) for x in (gmem.log_sum, gmem.d_sum)
      )
      x, factor = logits.of(_products(backend, k_smem, q_smem))
      weights = where_seen(jnp.exp2(x * factor - log_sum), 0.0, rows, steps, step)
      smem.weights[...] = weights.astype(jnp.bfloat16)
      d_out_smem[...] = d_outs
      queries = queries_of(gmem.q, n + 1)
      d_v = _sums(backend, smem.weights, d_out_smem, d_v)
      d_logits = weights * (_products(backend, v_smem, d_out_smem) - d_sum)
      smem.weights[...] = logits.slope(x, d_logits).astype(jnp.bfloat16)
      return _sums(backend, smem.weights, q_smem, d_k), d_v, queries

    carry = _zeros(K), _zeros(V), queries_of(gmem.q, 0)
    d_k, d_v, _ = lax.fori_loop(0, per_head * (H // G), advance, carry)
    _store(outs[0].at[own], [x * logits.scale for x in d_k], smem.weights)
    _store(outs[1].at[own], d_v, smem.weights)

  pair = smem_tile(C, K), smem_tile(C, V)
  return _launch(
    body,
    _Gmem(q, k, v, seen_by, d_out, None, log_sum, d_sum),
    tuple(jax.ShapeDtypeStruct((B, S, G, width), jnp.bfloat16) for width in (K, V)),
    _Smem(pair, pair, smem_tile(C, C)),
    grid=(B, G, S // C),
    name="key_gradient",
    backend=backend,
  )


class _Queries:
  """A CTA of 64 queries of a head, whose keys `group` heads share."""

  def __init__(self, gmem: _Gmem, group: int):
    self.batch, self.head = lax.axis_index("row"), lax.axis_index("head")
    self.key_head, self.last_key = lax.div(self.head, group), gmem.k.shape[1] // C - 1
    # With causal masks the last have most to do: they come first.
    start = gmem.q.shape[1] - C - lax.axis_index("tile") * C
    self.tokens = pl.ds(start, C)
    self.own = self.batch, self.tokens, self.head
    self.steps = steps_of(gmem.bounds, self.batch, start, C, C)
    self.rows = load_range(gmem.bounds, self.batch, start)

  def keys(self, step: jax.Array) -> tuple:
    """Where the keys or values of a step are; the last ones, if there is none."""
    return self.batch, pl.ds(jnp.minimum(step, self.last_key) * C, C), self.key_head


def _views(step: tuple, *widths: int) -> tuple[Ref, ...]:
  """The first columns of a tile."""
  return tuple(step[0].at[:, pl.ds(0, width)] for width in widths)


def _zeros(width: int) -> tuple[jax.Array, ...]:
  return tuple(zero_accumulator(C, C) for _ in blocks_of(width))


def _products(backend: Mma, a_smem: Ref, b_smem: Ref) -> jax.Array:
  """[C, C]: those of the rows of two tiles."""
  blocks = blocks_of(a_smem.shape[1])
  return backend.dots(Dots([(a_smem.at[:, x], transpose_ref(b_smem.at[:, x])) for x in blocks]))[0]


def _sums(backend: Mma, weights_smem: Ref, b_smem: Ref, starts: Sequence) -> tuple[jax.Array, ...]:
  """Sums of the rows of a tile, onto `starts`, in blocks of columns."""
  pairs = zip(blocks_of(b_smem.shape[1]), starts, strict=True)
  return tuple(backend.dot(weights_smem, b_smem.at[:, x], start=start) for x, start in pairs)


def _store(target_gmem: Ref, blocks: Sequence[jax.Array], staging_smem: Ref) -> None:
  """Stores blocks of columns as bfloat16."""
  for columns, value in zip(blocks_of(target_gmem.shape[1]), blocks, strict=True):
    store_tile(target_gmem.at[:, columns], value, staging_smem)


def _launch(
  body: Callable[..., None], arrays: _Gmem, out_type: Any, scratch: _Smem, *, grid, name, backend
) -> Any:
  """Runs `body(arrays_gmem, outs_gmem, scratch)` in every CTA.

  The last axis of the grid varies fastest: CTAs that run together read the same tokens.
  """
  (results,) = plgpu.kernel(
    body,
    out_type=[out_type],
    scratch_types=[scratch],
    grid=grid,
    grid_names=("row", "head", "tile"),
    interpret=backend.interpret,
    kernel_name=f"attention_ampere_{name}",
    compiler_params=COMPILER_PARAMS,
  )(arrays)
  return results

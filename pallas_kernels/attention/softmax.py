"""Shared by the attention kernels: ranges of visible tokens, a running softmax."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.config import ROWS
from pallas_kernels.attention.dropout import Dropout, mask
from pallas_kernels.attention.types import LOWEST, Range
from pallas_kernels.core.wgmma import ROW_LAYOUT, broadcast_rows, iota, load_row_vector


class Steps(NamedTuple):
  """Steps [begin, end) of a loop over tiles, of which [inside, outside) need no mask."""

  begin: jax.Array
  end: jax.Array
  inside: jax.Array
  outside: jax.Array


def steps_of(bounds: Range, batch: jax.Array, start: jax.Array, rows: int, tile: int) -> Steps:
  """The steps of the tokens [start, start + rows)."""
  last = start + rows - 1
  first = lambda token: token if bounds.first is None else bounds.first[batch, token]
  past = lambda token: token + 1 if bounds.end is None else bounds.end[batch, token]
  begin = lax.div(first(start), tile)
  end = lax.div(past(last) + (tile - 1), tile)
  inside = lax.div(first(last) + (tile - 1), tile)
  outside = lax.div(past(start), tile)
  return Steps(begin, jnp.maximum(begin, end), inside, outside)


def visible(rows: Range, step: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Which tokens of a step, along the columns, the tokens along the rows see."""
  column = iota(shape, 1)
  start = step * shape[1]
  first, end = (broadcast_rows(x - start, shape) for x in rows)
  return (column >= first) & (column < end)


def load_range(bounds: Range, batch: jax.Array, start: jax.Array) -> Range:
  """The ranges of the rows of a warpgroup, in registers."""
  token = start + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW_LAYOUT)
  load = lambda x: load_row_vector(x.at[batch, pl.ds(start, ROWS)])
  return Range(
    token if bounds.first is None else load(bounds.first),
    token + 1 if bounds.end is None else load(bounds.end),
  )


def where_seen(x: jax.Array, other: float, rows: Range, steps: Steps, step: jax.Array) -> jax.Array:
  """x [rows, tile] of a step, and `other` where a token does not see one of the step's."""
  masked = (step < steps.inside) | (step >= steps.outside)
  seen = lambda: jnp.where(visible(rows, step, x.shape), x, other)
  return lax.cond(masked, seen, lambda: x)


class Dropped(NamedTuple):
  """The masks of the queries of a warpgroup, in registers."""

  words: tuple[jax.Array, ...]  # two of [64]
  start: jax.Array  # [64]
  rate: float

  @classmethod
  def load(cls, gmem: Dropout | None, batch, head, start, rate: float) -> "Dropped | None":
    """That of the queries from `start` on; None where nothing is dropped."""
    if gmem is None:
      return None
    tokens = pl.ds(start, ROWS)
    words = tuple(load_row_vector(x.at[batch, head, tokens]) for x in gmem.words)
    return cls(words, load_row_vector(gmem.start.at[batch, tokens]), rate)

  def of(self, x: jax.Array, step: jax.Array) -> jax.Array:
    """x [64, tile], a factor of each weight of a step, with those of dropped weights 0."""
    number = step * x.shape[1] + iota(x.shape, 1) - broadcast_rows(self.start, x.shape)
    return mask(tuple(broadcast_rows(w, x.shape) for w in self.words), number, self.rate)(x)


class Softmax(NamedTuple):
  """A running softmax of 64 queries."""

  value: Any  # [64, V], or its columns: sum_j 2^(x_j - top) v_j
  top: Any  # [64]: max_j x_j, or `LOWEST`
  total: Any  # [64]: sum_j 2^(x_j - top)

  @classmethod
  def empty(cls, value: Any) -> "Softmax":
    """That of no keys, whose `value` is zero."""
    constant = lambda x: plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), ROW_LAYOUT)
    return cls(value, constant(LOWEST), constant(0.0))

  def advance(self, x: jax.Array, factor: float) -> tuple[jax.Array, ...]:
    """(top, total, what the sums so far shrink by, weights) with further logits `factor` x."""
    top = jnp.maximum(self.top, jnp.max(x, axis=1) * factor)
    weights = jnp.exp2(x * factor - broadcast_rows(top, x.shape))
    shrink = jnp.exp2(self.top - top)
    return top, self.total * shrink + jnp.sum(weights, axis=1), shrink, weights

  def end(self) -> tuple[jax.Array, jax.Array]:
    """[64] each: what `value` is multiplied by, and the logarithm of the denominator in base 2.

    Both are 0 for a query that sees no key.
    """
    some = self.total > 0.0
    total = jnp.where(some, self.total, 1.0)
    return jnp.where(some, 1.0 / total, 0.0), jnp.where(some, self.top + jnp.log2(total), 0.0)

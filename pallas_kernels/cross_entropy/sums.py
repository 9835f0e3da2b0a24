"""Sums over the logits of a position, its statistics and gradients: of both architectures' kernels.

    largest = max(z)      sum = sum exp(z - largest)      ties = number of z that equal largest
    d_j = w (exp(z_j - largest) / sum (1 + 2 z_loss log_sum) - [j = target]
             + [z_j = largest] logit_penalty largest / ties),      log_sum = largest + log(sum)

Every thread has sums of its own, relative to its own maximum; they meet once per position: in a
warp by shuffles, over warps in SMEM, always in the same order.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cross_entropy.config import LANES, TILE
from pallas_kernels.cross_entropy.types import NUM_STATISTICS, Static

LOWEST = float(jnp.finfo(jnp.float32).min)  # finite, because -inf - (-inf) would be NaN
WARPS = 4  # per warpgroup
# A warp has rows of 128 logits, four adjacent ones per thread.
LAYOUT = plgpu.Layout.TILED(
  plgpu.Tiling(((TILE, LANES), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


class Sums(NamedTuple):
  """Sums over the logits that a thread has seen, those of a warp, or all of them."""

  largest: Any
  total: Any  # of exp(z - largest)
  ties: Any  # None without a penalty


def places(rows: int) -> Any:
  """Columns of a block of rows, counted from its first."""
  iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, (rows, LANES), axis, layout=LAYOUT)
  return iota(0) * LANES + iota(1)


def no_sums(static: Static) -> Sums:
  """Those of each thread before the first logit."""
  full = lambda x: plgpu.layout_cast(jnp.full((TILE, LANES), x, jnp.float32), LAYOUT)
  return Sums(full(LOWEST), full(0.0), full(0.0) if static.logit_penalty else None)


def add(sums: Sums, z: Any) -> Sums:
  """Adds rows of logits to the sums of each thread, which become relative to its new maximum."""
  tiles = [z[r : r + TILE] for r in range(0, z.shape[0], TILE)]
  largest = functools.reduce(jnp.maximum, tiles, sums.largest)
  total = sums.total * jnp.exp(sums.largest - largest)
  total = total + _tree_sum([jnp.exp(tile - largest) for tile in tiles])
  ties = sums.ties
  if ties is not None:
    ties = jnp.where(sums.largest == largest, ties, 0.0)
    ties = ties + _tree_sum([jnp.where(tile == largest, 1.0, 0.0) for tile in tiles])
  return Sums(largest, total, ties)


def of_warps(sums: Sums) -> Sums:
  """The sums of each warp [WARPS]."""
  largest = jnp.max(sums.largest, axis=1)
  spread = plgpu.layout_cast(lax.broadcast_in_dim(largest, (TILE, LANES), [0]), LAYOUT)
  total = jnp.sum(sums.total * jnp.exp(sums.largest - spread), axis=1)
  ties = None
  if sums.ties is not None:
    ties = jnp.sum(jnp.where(sums.largest == spread, sums.ties, 0.0), axis=1)
  return Sums(largest, total, ties)


def of_all(sums_smem: Any, warps: Sequence[int], static: Static) -> Sums:
  """The sums over all warps, which have stored theirs [3, warps]."""
  all_largest = [sums_smem[0, warp] for warp in warps]
  largest = functools.reduce(jnp.maximum, all_largest)
  total = _tree_sum([sums_smem[1, w] * jnp.exp(all_largest[w] - largest) for w in warps])
  ties = None
  if static.logit_penalty:
    ties = _tree_sum([jnp.where(all_largest[w] == largest, sums_smem[2, w], 0.0) for w in warps])
  return Sums(largest, total, ties)


def statistics(sums: Sums, target_logit: Any) -> Any:
  """The statistics of a position [NUM_STATISTICS], one per warp."""
  ties = jnp.float32(0.0) if sums.ties is None else sums.ties
  fields = plgpu.broadcasted_iota(jnp.int32, (NUM_STATISTICS,), 0, layout=LAYOUT.reduce(1))
  values = target_logit
  for field, value in reversed(list(enumerate((sums.largest, sums.total, ties)))):
    values = jnp.where(fields == field, value, values)
  return values


def gradient(static: Static, sums: Sums, weight: Any) -> Callable[[Any, Callable[[], Any]], Any]:
  """(logits, () -> whether each is that of the target) -> the gradient by them, float32."""
  factor = weight / sums.total
  if static.z_loss:
    log_sum = sums.largest + jnp.log(sums.total)
    factor = factor * (1.0 + 2.0 * static.z_loss * log_sum)
  if static.logit_penalty:
    # Ties share the gradient, as in jnp.max.
    share = weight * static.logit_penalty * sums.largest / sums.ties

  def of(z, is_target):
    d = jnp.exp(z - sums.largest) * factor
    d = jnp.where(is_target(), d - weight, d)
    if static.logit_penalty:
      d = jnp.where(z == sums.largest, d + share, d)
    # Selected, not multiplied: a position of weight 0 may have logits that are not finite.
    return jnp.where(weight != 0.0, d, 0.0)

  return of


def _tree_sum(terms):
  """The sum of several values, in a fixed order with a short chain of dependences."""
  while len(terms) > 1:
    pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
    terms = pairs + terms[2 * len(pairs) :]
  return terms[0]

"""The inverse X of I + N for a strictly lower triangular N of 64 rows, exact to about 16 bits.

First the inverses D of the four diagonal blocks of 16 rows, by forward substitution in float32: one
thread for each column of each block. Then the block columns of X, from the last to the first. With
P = -N D, block column n of N times block n of D, X (I + N) = I is

    X[:, n] = D_n + sum over blocks m > n of X[:, m] P[m, n]

by tensor cores, each float32 operand as the sum of two bfloat16 ones. A power series for the whole
of N would not do: its terms may be many orders of magnitude larger than the inverse. Here all
factors are solutions of parts of the system.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.wgmma import Backend, Dots, Ref, iota, smem_tile

_SIZE = 16  # of a diagonal block
_BLOCKS = 4
ROWS = _BLOCKS * _SIZE
# [blocks, size]: warp b has the columns of block b, one in each lane (twice).
_COLUMNS = plgpu.Layout.TILED(
  plgpu.Tiling(((_BLOCKS, _SIZE), (1,))), (-3,), (plgpu.Replicated(2), -2), -1
)


class InverseTiles(NamedTuple):
  """SMEM of `triangular_inverse`, of no use before or after. Each is two tiles, a sum."""

  lower: Any  # [C, C - size] bfloat16: -N
  diagonal: Any  # [C, size]: the inverses D of the diagonal blocks
  pairs: Any  # [C, C - size]: -N D

  @classmethod
  def of(cls) -> "InverseTiles":
    """Allocates it: 28 KiB."""
    both = lambda columns: [smem_tile(ROWS, columns, tile=_SIZE)] * 2
    return cls(both(ROWS - _SIZE), both(_SIZE), both(ROWS - _SIZE))


def diagonal_blocks() -> Any:
  """SMEM for `triangular_inverse`."""
  return plgpu.SMEM((_BLOCKS, _SIZE, _SIZE), jnp.float32)


def lhs_scratch(backend: Backend) -> Any:
  """Of `Backend.to_lhs`, for `triangular_inverse`."""
  return backend.lhs_scratch(2, ROWS, _SIZE, tile=_SIZE)


def triangular_inverse(
  lower: jax.Array, blocks_smem: Ref, tiles: InverseTiles, lhs_smem: Any, backend: Backend
) -> jax.Array:
  """[C, C] float32: (I + lower)^-1, for `lower` in float32, strictly lower triangular.

  The error was 1.4e-5 of the inverse at most, for keys close together; it is rounded to bfloat16
  next, by up to 4e-3.

  `blocks_smem`, `lhs_smem`: of `diagonal_blocks` and `lhs_scratch`. Where it needs a barrier, there
  is one, also before it overwrites `tiles`, of whose memory products that this warpgroup waited for
  may still read in other warps: the kernel may do without those that JAX adds to each store.
  """
  C, size = ROWS, _SIZE
  column = lambda x, n: x[:, n * size : (n + 1) * size]
  block_of_row = lax.div(iota((C, size), 0), jnp.int32(size))
  diagonal = column(lower, 0)
  for n in range(1, _BLOCKS):
    diagonal = jnp.where(block_of_row == n, column(lower, n), diagonal)
  backend.store_folded(blocks_smem, diagonal)
  backend.barrier()
  _store_halves(tiles.lower, -lower[:, : C - size])  # now: registers are scarce in what follows
  _invert_blocks(blocks_smem, backend)
  backend.barrier()
  diagonal = backend.load_folded(blocks_smem, (C, size))
  _store_halves(tiles.diagonal, diagonal)
  backend.commit()

  part = lambda tiles, rows, columns: [x.at[rows, columns] for x in tiles]
  block = lambda n: pl.ds(n * size, size)
  # Rows of block n of column n are not -N D; nobody reads them.
  products = [
    _exact(part(tiles.lower, slice(None), block(n)), part(tiles.diagonal, block(n), slice(None)))
    for n in range(_BLOCKS - 1)
  ]
  products = backend.dots(*products)
  _store_halves(tiles.pairs, jnp.concatenate(products, axis=1))
  backend.commit()
  own = [jnp.where(block_of_row == n, diagonal, 0.0) for n in range(_BLOCKS)]
  columns, last = [own[-1]], own[-1]
  rest = jnp.concatenate(own[:-1], axis=1)
  for n in range(_BLOCKS - 1, 0, -1):
    left = [backend.to_lhs(x, lhs_smem, i) for i, x in enumerate(_halves(last))]
    right = part(tiles.pairs, block(n), pl.ds(0, n * size))
    (rest,) = backend.dots(_exact(left, right, rest))
    last, rest = column(rest, n - 1), rest[:, : (n - 1) * size] if n > 1 else None
    columns.append(last)
  return jnp.concatenate(columns[::-1], axis=1)


def _invert_blocks(blocks_smem, backend):
  """Replaces each N [S, S] of `blocks_smem` [B, S, S] by (I + N)^-1."""
  shape = (_BLOCKS, _SIZE)
  column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_COLUMNS)
  rows = []
  for i in range(_SIZE):
    row = jnp.where(column == i, 1.0, 0.0).astype(jnp.float32)
    for j in range(i):
      factor = plgpu.load(blocks_smem.at[:, i, j], layout=_COLUMNS.reduce(1), optimized=False)
      factor = plgpu.layout_cast(lax.broadcast_in_dim(factor, shape, [0]), _COLUMNS)
      row = row - factor * rows[j]
    rows.append(row)
  backend.barrier()
  for i, row in enumerate(rows):
    blocks_smem.at[:, i, :][...] = row


def _halves(value):
  """float32 as the sum of two bfloat16 numbers: the upper half of its bits, and the rest.

  Rounded as whole numbers: the GPU has no fast conversion of single numbers to bfloat16 and back.
  """
  bits = (lax.bitcast_convert_type(value, jnp.int32) + 0x8000) & jnp.int32(-65536)
  upper = lax.bitcast_convert_type(bits, jnp.float32)
  return upper.astype(jnp.bfloat16), (value - upper).astype(jnp.bfloat16)


def _store_halves(tiles_smem, value):
  for tile, half in zip(tiles_smem, _halves(value), strict=True):
    tile[...] = half


def _exact(a, b, start=None):
  """The product of two split operands, without the product of both low parts."""
  return Dots([(a[1], b[0]), (a[0], b[1]), (a[0], b[0])], start)

"""The inverse of I + N for a strictly lower triangular N of 64 rows, exact to about 16 bits.

First the four diagonal blocks of 16 rows, by forward substitution in float32: one thread for each
column of each block. With D their inverses, G the rest of N and M = D G, which has four blocks and
so M^4 = 0,

    (I + N)^-1 = (I + M)^-1 D = (I + M^2) (D - M D)

by tensor cores, each float32 operand as the sum of two bfloat16 ones. A power series for the whole
of N would not do: its terms may be many orders of magnitude larger than the inverse. Here there are
four terms, the powers of M, which are as small as solutions of parts of the system.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.wgmma import Backend, Dots, Ref, iota

_SIZE = 16  # of a diagonal block
_BLOCKS = 4
ROWS = _BLOCKS * _SIZE
# [blocks, size]: warp b has the columns of block b, one in each lane (twice).
_COLUMNS = plgpu.Layout.TILED(
  plgpu.Tiling(((_BLOCKS, _SIZE), (1,))), (-3,), (plgpu.Replicated(2), -2), -1
)

NUM_TILES = 6  # of [C, C] that `triangular_inverse` needs


def diagonal_blocks() -> Any:
  """SMEM for `triangular_inverse`."""
  return plgpu.SMEM((_BLOCKS, _SIZE, _SIZE), jnp.float32)


def triangular_inverse(
  lower: jax.Array, blocks_smem: Ref, tiles_smem: Sequence[Ref], backend: Backend
) -> jax.Array:
  """[C, C] float32: (I + lower)^-1, for `lower` in float32, strictly lower triangular.

  The error was 1.4e-5 of the inverse at most, for keys close together; it is rounded to bfloat16
  next, by up to 4e-3.

  `blocks_smem`: of `diagonal_blocks`; `tiles_smem`: `NUM_TILES` tiles [C, C] to be overwritten, of
  which products that this warpgroup waited for may still read the first four in other warps. Where
  it needs a barrier, there is one: the kernel may do without those that JAX adds to each store.
  """
  C, size = ROWS, _SIZE
  block_of_row = lax.div(iota((C, size), 0), jnp.int32(size))
  diagonal = lower[:, :size]
  for b in range(1, _BLOCKS):
    diagonal = jnp.where(block_of_row == b, lower[:, b * size : (b + 1) * size], diagonal)
  same_block = lax.div(iota((C, C), 0), jnp.int32(size)) == lax.div(
    iota((C, C), 1), jnp.int32(size)
  )
  left, right, m = tiles_smem[0:2], tiles_smem[2:4], tiles_smem[4:6]
  backend.store_folded(blocks_smem, diagonal)
  backend.commit()
  _split(right, jnp.where(same_block, 0.0, lower))  # now: registers are scarce in what follows
  _invert_blocks(blocks_smem, backend)
  backend.commit()

  def inverses():
    diagonal = backend.load_folded(blocks_smem, (C, size))
    of_blocks = [jnp.where(block_of_row == b, diagonal, 0.0) for b in range(_BLOCKS)]
    return jnp.concatenate(of_blocks, axis=1)

  _split(left, inverses())
  backend.commit()
  (product,) = backend.dots(_exact(left, right))
  _split(m, -product)
  backend.commit()
  (rest,) = backend.dots(_exact(m, left, inverses()))
  _split(right, rest)
  (square,) = backend.dots(_exact(m, m))
  backend.commit()  # all warps have read `left`
  _split(left, square)
  backend.commit()
  return backend.dots(_exact(left, right, rest))[0]


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
  backend.commit()
  for i, row in enumerate(rows):
    blocks_smem.at[:, i, :][...] = row


def _split(halves_smem, value):
  """Stores float32 as the sum of two bfloat16 tiles: the upper half of its bits, and the rest.

  Rounded as whole numbers: the GPU has no fast conversion of single numbers to bfloat16 and back.
  """
  high, low = halves_smem
  bits = (lax.bitcast_convert_type(value, jnp.int32) + 0x8000) & jnp.int32(-65536)
  upper = lax.bitcast_convert_type(bits, jnp.float32)
  high[...] = upper.astype(jnp.bfloat16)
  low[...] = (value - upper).astype(jnp.bfloat16)


def _exact(a, b, start=None):
  """The product of two split operands, without the product of both low parts."""
  return Dots([(a[1], b[0]), (a[0], b[1]), (a[0], b[0])], start)

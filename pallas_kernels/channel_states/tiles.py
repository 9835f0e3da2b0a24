"""How the kernels of this folder share a tile of states among threads.

A tile is [rows, N]: rows of channels, one row to a thread or to a few lanes beside one another. A
thread holds 4 neighbouring states of a row at a time. A block works on several tiles, as a list:
what a thread reads of a step's keys serves all of them.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

VECTOR = 4  # states of a row that lie in a thread together
THREADS = 128
# Barriers are written out: what threads share through memory is written before `commit_smem`.
COMPILER_PARAMS = plgpu.CompilerParams(
  approx_math=True,
  unsafe_no_auto_barriers=True,
  reduction_scratch_bytes=0,
  lowering_semantics=plgpu.LoweringSemantics.Lane,
)
load_from = functools.partial(plgpu.load, optimized=False)


class Tiles:
  """`number` tiles [rows, N], each row shared by `lanes` threads (1, 2 or 4)."""

  def __init__(self, N, lanes, number):
    self.N, self.lanes, self.number = N, lanes, number
    self.rows = THREADS // lanes
    self.channels = self.rows * number
    rows = 32 // lanes
    if lanes == 1:
      tiling = plgpu.Tiling(((THREADS, VECTOR), (32, VECTOR)))
      dims = {"warp_dims": (-4,), "lane_dims": (-2,)}
    else:
      wide = VECTOR * lanes
      tiling = plgpu.Tiling(((4 * rows, wide), (rows, wide), (VECTOR,)))
      dims = {"warp_dims": (-5,), "lane_dims": (-3, -2)}
    self.layout = plgpu.Layout.TILED(tiling, **dims, vector_dim=-1)
    self.by_row, self.by_state = self.layout.reduce(1), self.layout.reduce(0)

  def places(self, base=0):
    """The channels of each tile, from `base`."""
    return [pl.ds(base + n * self.rows, self.rows) for n in range(self.number)]

  def load(self, ref, base=0):
    """Tiles of a reference [channels, N], as float32."""
    return [load_from(ref.at[p], layout=self.layout).astype(jnp.float32) for p in self.places(base)]

  def vectors(self, ref, base=0):
    """Vectors of channels of a reference [channels], one for each tile, as float32."""
    return [load_from(ref.at[p], layout=self.by_row).astype(jnp.float32) for p in self.places(base)]

  def states(self, ref):
    """A vector of states, repeated along the rows of a tile."""
    return self._repeated(load_from(ref, layout=self.by_state).astype(jnp.float32), 1)

  def across(self, vector):
    """A vector of channels, repeated along the states of a tile."""
    return self._repeated(vector, 0)

  def sum_of(self, a, b):
    """The sum over the states of a product, a vector of channels."""
    width = VECTOR * self.lanes
    total = None
    for start in range(0, self.N, width):
      part = lambda x, start=start: lax.slice(x, (0, start), (self.rows, start + width))
      product = part(a) * part(b)
      total = product if total is None else total + product
    return jnp.sum(total, axis=1)

  def _repeated(self, vector, axis):
    wide = lax.broadcast_in_dim(vector, (self.rows, self.N), [axis])
    return plgpu.layout_cast(wide, self.layout)

  def zeros(self):
    """A tile of zeros."""
    return plgpu.layout_cast(jnp.zeros((self.rows, self.N), jnp.float32), self.layout)

  def no_channels(self):
    """A vector of zeros."""
    return plgpu.layout_cast(jnp.zeros((self.rows,), jnp.float32), self.by_row)


def barrier():
  """Waits for the other threads of the block, as `commit_smem` does, but not for their stores to
  device memory, nor for what asynchronous copies are to see."""
  plgpu.wait_smem_to_gmem(8, wait_read_only=True)

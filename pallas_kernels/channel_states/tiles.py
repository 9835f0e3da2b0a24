"""Register layout of states [channels, N] in the kernels of this folder."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.channel_states.config import THREADS, VECTOR

# Barriers are written out: what threads share through SMEM is stored before `Backend.commit`.
COMPILER_PARAMS = plgpu.CompilerParams(
  approx_math=True,
  unsafe_no_auto_barriers=True,
  reduction_scratch_bytes=0,
  lowering_semantics=plgpu.LoweringSemantics.Lane,
)


class StateTiles:
  """`number` tiles [rows, N] of a CTA, each row shared by `lanes` threads (1, 2 or 4).

  A row is a channel. A thread holds 4 adjacent states of a row at a time. A CTA works on several
  tiles, as a list: what a thread loads of a token's keys serves all of them.
  """

  def __init__(self, N: int, lanes: int, number: int):
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
    self.channel_layout, self.state_layout = self.layout.reduce(1), self.layout.reduce(0)

  def slices(self, base=0):
    """The channels of each tile, from `base`."""
    return [pl.ds(base + n * self.rows, self.rows) for n in range(self.number)]

  def load(self, ref, base=0):
    """Tiles of a reference [channels, N]."""
    return [_load(ref.at[at], self.layout) for at in self.slices(base)]

  def load_channels(self, ref, base=0):
    """Vectors of channels of a reference [channels], one per tile."""
    return [_load(ref.at[at], self.channel_layout) for at in self.slices(base)]

  def load_states(self, ref):
    """A vector of states, of a reference [N], repeated along the rows of a tile."""
    return self._broadcast(_load(ref, self.state_layout), 1)

  def broadcast_channels(self, vector):
    """A vector of channels, repeated along the states of a tile."""
    return self._broadcast(vector, 0)

  def dot(self, a, b):
    """The sum over states of a * b, a vector of channels."""
    width = VECTOR * self.lanes
    part = lambda x, start: lax.slice(x, (0, start), (self.rows, start + width))
    products = [part(a, start) * part(b, start) for start in range(0, self.N, width)]
    return jnp.sum(sum(products[1:], products[0]), axis=1)

  def zeros(self):
    """A tile of zeros."""
    return plgpu.layout_cast(jnp.zeros((self.rows, self.N), jnp.float32), self.layout)

  def zero_channels(self):
    """A vector of zeros."""
    return plgpu.layout_cast(jnp.zeros((self.rows,), jnp.float32), self.channel_layout)

  def _broadcast(self, vector, axis):
    wide = lax.broadcast_in_dim(vector, (self.rows, self.N), [axis])
    return plgpu.layout_cast(wide, self.layout)


def _load(ref, layout):
  """From SMEM or GMEM, as float32."""
  return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

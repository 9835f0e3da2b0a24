"""The chunk that a CTA processes."""

from typing import NamedTuple

import jax
from jax.experimental import pallas as pl

from pallas_kernels.core.wgmma import TILE_WIDTH, Ref


class ChunkIndex(NamedTuple):
  """The chunk that a CTA processes, and the block of 64 channels (of keys or of values)."""

  batch: jax.Array
  head: jax.Array
  chunk: jax.Array
  block: jax.Array | int
  size: int  # tokens of a chunk

  @property
  def tokens(self):
    """The chunk's slice of the time axis."""
    return pl.ds(self.chunk * self.size, self.size)

  @property
  def channels(self):
    """The block's slice of a channel axis."""
    return pl.ds(self.block * TILE_WIDTH, TILE_WIDTH)

  def table_row(self, table_gmem: Ref) -> Ref:
    """The chunk's slice of a table [B|1, H, T|C], which stores chunks that are all alike once."""
    tokens = self.tokens if table_gmem.shape[2] > self.size else pl.ds(0, self.size)
    return table_gmem.at[self.batch if table_gmem.shape[0] > 1 else 0, self.head, tokens]

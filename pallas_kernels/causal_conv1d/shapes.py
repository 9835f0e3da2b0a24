"""How the causal convolution is shared among blocks.

Nothing here depends on the length but the number of parts.
"""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels import chip

THREADS = 128  # of a block
WIDEST = 4  # steps that a convolution sees at most: each thread keeps them in registers


class Sizes(NamedTuple):
  """What one block does."""

  vector: int  # neighbouring channels of a thread
  rows: int  # steps that are read together
  blocks: int  # that a multiprocessor gets, where the sequence is long enough

  @property
  def channels(self) -> int:
    """Of a block."""
    return THREADS * self.vector


_FORWARD = {2: Sizes(2, 4, 8), 4: Sizes(2, 4, 8)}  # by the bytes of a number
_BACKWARD = {2: Sizes(4, 8, 2), 4: Sizes(2, 8, 4)}
_SHORTEST = 32  # steps of a part


def sizes(channels: int, dtype, *, backward: bool) -> Sizes:
  """For a multiple of 128 channels."""
  best = (_BACKWARD if backward else _FORWARD)[jnp.dtype(dtype).itemsize]
  vector = best.vector
  while channels % (THREADS * vector):
    vector //= 2
  return best._replace(vector=vector, blocks=best.blocks * best.vector // vector)


def part(sizes: Sizes, batch: int, channels: int, length: int) -> int:
  """The steps of a part, so that all multiprocessors have work: whole groups of rows."""
  blocks = batch * (channels // sizes.channels)
  number = min(sizes.blocks * chip.MULTIPROCESSORS // blocks, length // _SHORTEST)
  steps = -(-length // max(number, 1))
  return -(-steps // sizes.rows) * sizes.rows

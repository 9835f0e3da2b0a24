"""Tile sizes of the cross-entropy kernel."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.core import device

LANES = 128  # columns per row of a chunk: the size of the vocabulary is a multiple
TILE = 4  # rows of a chunk that a consumer reduces together, one per warp
_RESERVED = 2 * 1024  # bytes of SMEM for sums and barriers


@dataclasses.dataclass(frozen=True)
class KernelConfig:
  """Tile sizes of the kernel."""

  slots: int  # chunks of logits in SMEM
  chunk: int = 32  # rows of LANES logits per copy
  consumers: int = 2  # warpgroups that share each chunk

  def __post_init__(self):
    if self.chunk % (TILE * self.consumers) or not 0 < self.chunk <= 256:
      raise ValueError(
        f"chunk={self.chunk} must be a multiple of {TILE} rows for each of "
        f"consumers={self.consumers}, up to 256, the limit of a copy."
      )
    if self.slots < 2:
      raise ValueError(f"slots={self.slots} must be at least 2: one arrives while one is read.")

  @property
  def share(self) -> int:
    """Rows of a chunk per consumer."""
    return self.chunk // self.consumers

  def num_chunks(self, columns: int) -> int:
    """Chunks per position; the last one may be shorter."""
    return -(-columns // (self.chunk * LANES))

  def resident(self, columns: int) -> bool:
    """Whether all logits of a position fit in SMEM, so that they are loaded once."""
    return self.num_chunks(columns) <= self.slots


def kernel_config(dtype, consumers: int = 2) -> KernelConfig:
  """As many slots as fit in SMEM next to the staged gradients.

  13 for bfloat16: vocabularies of up to 53,248 are loaded once.

  Args:
    dtype: of the gradient; None: there is none.
  """
  chunk = 32
  # Each consumer has two buffers for its share: one is written while the other leaves.
  staged = 0 if dtype is None else 2 * chunk * LANES * jnp.dtype(dtype).itemsize
  slots = (device.current().smem - _RESERVED - staged) // (
    chunk * LANES * jnp.dtype(jnp.float32).itemsize
  )
  return KernelConfig(slots, chunk, consumers)

"""Products and copies that every NVIDIA GPU since Ampere can do: `mma.sync`, registers, SMEM.

No wgmma, no TMA, no asynchronous copies, no barriers but those that JAX puts around each store: so
one program serves compute capabilities 8.0 to 12.1, and what runs on a Hopper GPU is what runs on
the others. A CTA is one warpgroup. Tiles and vectors are those of `core/wgmma.py`: an accumulator
of `mma.sync` has the layout of one of WGMMA.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.wgmma import (
  TILE_WIDTH,
  Backend,
  Dots,
  Ref,
  smem_tile,
  store_unoptimized,
  zero_accumulator,
)

_LHS = plgpu.Layout.MMA_LHS(jnp.bfloat16)
_RHS = plgpu.Layout.MMA_RHS(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Mma(Backend):
  """A kernel for Ampere and later, compiled or interpreted; bodies do not ask which."""

  def dots(self, *sums: Dots) -> tuple[Any, ...]:
    """The sums, one after the other. Operands are tiles of bfloat16, contracted over 64 of them."""
    return tuple(self._sum(*one) for one in sums)

  def overlapped(self, work: Callable[[], Any], *sums: Dots) -> tuple[Any, ...]:
    """(the result of `work`, *`dots(*sums)`), one after the other."""
    return (work(), *self.dots(*sums))

  def lhs_scratch(self, *shape: int) -> Any:
    """SMEM for `to_lhs`."""
    return smem_tile(*shape)

  def to_lhs(self, value: jax.Array, scratch_smem: Ref | None, *index: Any) -> Any:
    """Rounds `value` to bfloat16 as an operand of a product, in `scratch_smem`."""
    assert scratch_smem is not None
    scratch_smem = scratch_smem.at[index] if index else scratch_smem
    scratch_smem[...] = value.astype(jnp.bfloat16)
    return scratch_smem

  def commit(self) -> None:
    """Nothing: JAX puts barriers around each store, and products read SMEM as loads do."""

  def _sum(self, pairs, start):
    a, b = pairs[0]
    total = zero_accumulator(a.shape[0], b.shape[1]) if start is None else start
    for a, b in pairs:
      if self.interpret is None:
        total = plgpu.mma(total, plgpu.load(a, layout=_LHS), plgpu.load(b, layout=_RHS))
      else:
        left, right = (plgpu.load(x).astype(jnp.float32) for x in (a, b))
        total = total + jnp.dot(left, right, precision=jax.lax.Precision.HIGHEST)
    return total


def load_tiles(*copies: tuple[Ref, Ref]) -> None:
  """Copies pairs (GMEM, SMEM) of bfloat16 tiles: all loads are issued before the first store."""
  values = [plgpu.load(x, layout=_copied(x.shape), optimized=False) for x, _ in copies]
  for value, (_, target_smem) in zip(values, copies, strict=True):
    target_smem[...] = value


def store_tile(target_gmem: Ref, value: jax.Array, staging_smem: Ref) -> None:
  """Stores registers as bfloat16, in whole cache lines; `staging_smem` is to be overwritten."""
  staging_smem[...] = value.astype(jnp.bfloat16)
  copy_tile(staging_smem, target_gmem)


def copy_tile(source_smem: Ref, target_gmem: Ref) -> None:
  """Copies a bfloat16 tile to GMEM."""
  value = plgpu.load(source_smem, layout=_copied(source_smem.shape))
  store_unoptimized(target_gmem, value)


def blocks_of(width: int) -> Sequence[Any]:
  """Slices of 64 columns, what a product contracts."""
  return [pl.ds(start, TILE_WIDTH) for start in range(0, width, TILE_WIDTH)]


def _copied(shape):
  """The layout of a copy: 16 bytes per thread."""
  return plgpu.Layout.SMEM_GMEM_COPY(tuple(shape), jnp.bfloat16, 128)

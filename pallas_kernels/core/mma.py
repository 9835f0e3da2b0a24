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
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import device
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

  def lhs_scratch(self, *shape: int, tile: int = TILE_WIDTH) -> Any:
    """SMEM for `to_lhs`."""
    return smem_tile(*shape, tile=tile)

  def to_lhs(self, value: jax.Array, scratch_smem: Ref | None, *index: Any) -> Any:
    """Rounds `value` to bfloat16 as an operand of a product, in `scratch_smem`."""
    assert scratch_smem is not None
    scratch_smem = scratch_smem.at[index] if index else scratch_smem
    scratch_smem[...] = value.astype(jnp.bfloat16)
    return scratch_smem

  def commit(self) -> None:
    """A barrier of the warpgroup."""
    if self.interpret is None:
      _barrier()

  def barrier(self) -> None:
    """A barrier of the warpgroup."""
    self.commit()

  def start_copies(self, copies: Sequence[tuple[Ref, Ref]]) -> None:
    """Copies SMEM that was just written, pairs (SMEM, GMEM) of rows."""
    self.commit()
    for source_smem, target_gmem in copies:
      layout = _rows_layout(source_smem.shape, source_smem.dtype)
      store_unoptimized(target_gmem, plgpu.load(source_smem, layout=layout, optimized=False))

  def wait_copies(self, number: int = 0, *, wait_read_only: bool = True) -> None:
    """Nothing: a copy is done when it returns."""

  def pipeline(
    self,
    body: Callable[..., Any],
    *,
    grid: tuple[int],
    max_concurrent_steps: int,
    init_carry: Any,
    in_specs: Sequence[Any],
  ) -> Callable[..., Any]:
    """As `Backend.pipeline`, through registers.

    The next block is on its way to registers while `body` runs. What is too small for a copy is
    read in GMEM.
    """
    del max_concurrent_steps
    (number,) = grid

    def run(*sources_gmem):
      blocks = lambda n: [_block(*x, n) for x in zip(sources_gmem, in_specs, strict=True)]
      layouts = [_rows_layout(x.shape, x.dtype) for x in blocks(0)]
      copied = lambda items: [x for x, y in zip(items, layouts, strict=True) if y is not None]

      def load(n):
        pairs = zip(copied(blocks(n)), copied(layouts), strict=True)
        return [plgpu.load(x, layout=layout, optimized=False) for x, layout in pairs]

      def loop(*buffers_smem):
        def step(n, state):
          carry, values = state
          self.commit()  # all have read the block before
          for value, buffer_smem in zip(values, buffers_smem, strict=True):
            buffer_smem[...] = value
          self.commit()
          values = load(jnp.minimum(n + 1, number - 1))
          there = iter(buffers_smem)
          pairs = zip(blocks(n), layouts, strict=True)
          refs = [x if layout is None else next(there) for x, layout in pairs]
          return body((n,), *refs, carry), values

        return jax.lax.fori_loop(0, number, step, (init_carry, load(0)))[0]

      return pl.run_scoped(loop, *(plgpu.SMEM(x.shape, x.dtype) for x in copied(blocks(0))))

    return run

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


def of_architecture(architecture: str | None, interpret: Any) -> Backend:
  """The backend of kernels that are one program for all; None for the current device."""
  ampere = device.running(architecture) == device.AMPERE
  return Mma(interpret) if ampere else Backend(interpret)


def fetch_tile(source_gmem: Ref) -> jax.Array:
  """A bfloat16 tile on its way to registers, as it is to be stored in SMEM."""
  return plgpu.load(source_gmem, layout=_copied(source_gmem.shape), optimized=False)


def load_tiles(*copies: tuple[Ref, Ref]) -> None:
  """Copies pairs (GMEM, SMEM) of bfloat16 tiles: all loads are issued before the first store."""
  values = [fetch_tile(x) for x, _ in copies]
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


def _block(source_gmem: Ref, spec: Any, n: Any) -> Ref:
  """Block n of a stream."""
  index = zip(spec.block_shape, spec.index_map(n), strict=True)
  return source_gmem.at[tuple(i if size is None else pl.ds(i * size, size) for size, i in index)]


def _rows_layout(shape, dtype) -> Any:
  """The layout of a copy of rows, of as many bytes per thread as it allows; None: there is none."""
  if len(shape) != 2:
    return None
  rows, width = shape
  vector = 16 // jnp.dtype(dtype).itemsize
  while vector:
    lanes = min(width // vector, 32)
    of_warp = 32 // lanes if lanes and 32 % lanes == 0 else 0
    if of_warp and width % (lanes * vector) == 0 and rows % (4 * of_warp) == 0:
      wide = lanes * vector
      tiles, dims = [(4, wide), (vector,)], {"warp_dims": (-3,), "lane_dims": (-2,)}
      if of_warp > 1:
        tiles = [(4 * of_warp, wide), (of_warp, wide), (vector,)]
        dims = {"warp_dims": (-5,), "lane_dims": (-3, -2)}
      return plgpu.Layout.TILED(plgpu.Tiling(tuple(tiles)), **dims, vector_dim=-1)
    vector //= 2
  return None


@plgpu.inline_mgpu()
def _barrier(_):
  mgpu.warpgroup_barrier()


def _copied(shape):
  """The layout of a copy: 16 bytes per thread."""
  return plgpu.Layout.SMEM_GMEM_COPY(tuple(shape), jnp.bfloat16, 128)

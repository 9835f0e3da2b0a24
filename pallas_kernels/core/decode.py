"""Launch and register layout of single-token kernels, which update states [B, H, K, V] in place.

A CTA of 128 threads takes all K rows and a few columns of one head's state, so that sums over K
stay inside it. Its tile lives in registers between the load from GMEM and the store to it: there is
nothing to overlap, so no SMEM, pipeline or barrier. Everything is float32 on CUDA cores: a token
moves 8 bytes for a few operations, so tensor cores would gain nothing and cost exactness.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import device

WIDTH = 16  # K and V are padded to a multiple: 4 warps of at least 4 rows, 8 threads of 2 columns
MAX_KEY_DIM = 256  # rows that a CTA keeps in registers
TILES = (16, 32, 64)  # columns of the state that a CTA can have


def unsupported_state(state: jax.Array) -> str | None:
  """The reason why no kernel can update `state`, of two or more axes, in place; or None."""
  if state.dtype != jnp.float32:
    return f"the state is {state.dtype}; the kernel takes float32"
  if 0 in state.shape:
    return f"the state {state.shape} has an empty axis"
  if not jax.typeof(state).manual_axis_type.empty:
    return (
      "the state varies along a mesh axis of `shard_map`, where JAX rejects in-place kernels; "
      "use check_vma=False"
    )
  limit = device.MAX_GRID_SIZE
  if max(state.shape[:2]) > limit:
    return (
      f"the state {state.shape} is too large: a grid has at most {limit} thread blocks per axis"
    )
  return None


def unsupported_matrix_state(kv: jax.Array) -> str | None:
  """`unsupported_state` for a state [B, H, K, V]."""
  if kv.shape[2] > MAX_KEY_DIM:
    return f"K={kv.shape[2]}; a thread block keeps all K rows in registers, at most {MAX_KEY_DIM}"
  return unsupported_state(kv)


def unsupported_dtype(**arrays: jax.Array) -> str | None:
  """The name of an array that no kernel takes, with the reason; or None."""
  for name, x in arrays.items():
    if x.dtype not in (jnp.bfloat16, jnp.float32):
      return f"{name} is {x.dtype}; the kernel takes bfloat16 and float32"
  return None


def fits(K: int, V: int) -> bool:
  """Whether a state [..., K, V] needs no padding, which would copy it."""
  return K % WIDTH == 0 and V % WIDTH == 0


def value_tile(B: int, H: int, V: int) -> int:
  """Columns of the state per CTA, for V a multiple of 16.

  32 float32 are the 128 bytes of a memory transaction. 16 halve the work of a CTA, which pays when
  there are fewer CTAs than SMs.
  """
  return 16 if V % 32 or device.current().sm_count > B * H * (V // 32) else 32


def pad_last(x: jax.Array, *last: int) -> jax.Array:
  """`x` with zeros appended to its last axes."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - len(last)) + [(0, n) for n in last])


class Tile:
  """Register layout of a tile [K, columns] of a state, shared by the 128 threads of a CTA.

  A thread has 4 columns (16 bytes) of a row, or 2 if four warps would then exceed K; a warp covers
  whole rows, and the warps stack along K.
  """

  def __init__(self, K: int, columns: int):
    self.shape = K, columns
    vector = 4 if K % (4 * 32 * 4 // columns) == 0 else 2
    rows = 32 * vector // columns  # per warp
    tiling = plgpu.Tiling(((4 * rows, columns), (rows, columns), (vector,)))
    self.layout = plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    self.key_layout, self.value_layout = self.layout.reduce(1), self.layout.reduce(0)

  def load(self, ref_gmem):
    """A tile [K, columns], as float32."""
    return _load(ref_gmem, self.layout)

  def load_keys(self, ref_gmem):
    """A vector [K], as float32."""
    return _load(ref_gmem, self.key_layout)

  def load_values(self, ref_gmem):
    """A vector [columns], as float32."""
    return _load(ref_gmem, self.value_layout)

  def broadcast_keys(self, keys):
    """A vector [K], repeated along the columns."""
    return self._broadcast(keys, 0)

  def broadcast_values(self, values):
    """A vector [columns], repeated along the rows."""
    return self._broadcast(values, 1)

  def read(self, keys, state):
    """keys^T state, a vector [columns]."""
    return jnp.sum(self.broadcast_keys(keys) * state, axis=0)

  def _broadcast(self, vector, axis):
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, self.shape, [axis]), self.layout)


def _load(ref_gmem, layout):
  # `optimized` is about bank conflicts of SMEM; these are loads from GMEM.
  return plgpu.load(ref_gmem, layout=layout, optimized=False).astype(jnp.float32)


class Coordinates(NamedTuple):
  """The part of the arrays that a CTA works on."""

  batch: jax.Array
  head: jax.Array
  columns: Any  # a slice of V
  tile: jax.Array  # its number along V


def run(
  body: Callable[..., None],
  inputs: Any,
  kv: jax.Array,
  out_type: Sequence[jax.ShapeDtypeStruct],
  *,
  columns: int,
  name: str,
  interpret: Any,
) -> tuple[Sequence[jax.Array], jax.Array]:
  """Runs `body(tile, inputs_gmem, coordinates, kv_gmem, *outs_gmem)` per tile: (outs, the new kv).

  Args:
    body: gets the `Tile`; references to `inputs`; its `Coordinates`; the reference of its tile of
      `kv`, to be loaded and stored; references to what `out_type` describes.
    inputs: a tree of arrays.
    kv: [B, H, K, V]; its buffer becomes that of the result.
    columns: of a tile, a divisor of V.
    interpret: `plgpu.InterpretGPUParams`, or None to compile.
  """
  B, H, K, V = kv.shape
  tile = Tile(K, columns)

  def cta(inputs_gmem, kv_gmem, *outs_gmem):
    b, h, t = (lax.axis_index(name) for name in ("batch", "head", "tile"))
    at = pl.ds(t * columns, columns)
    body(tile, inputs_gmem, Coordinates(b, h, at, t), kv_gmem.at[b, h, :, at], *outs_gmem)

  # `plgpu.kernel` cannot name aliases of operands and results; a mutable reference becomes one.
  kv_ref = jax.new_ref(kv)
  outs = plgpu.kernel(
    cta,
    out_type=tuple(out_type),
    grid=(V // columns, H, B),
    grid_names=("tile", "head", "batch"),
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    interpret=interpret,
    kernel_name=name,
  )(inputs, kv_ref)
  return outs, jax.freeze(kv_ref)

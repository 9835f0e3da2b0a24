"""The frame of kernels that make a single step of states [B, H, K, V], in place.

A block takes all K rows and a few columns of one head's state, so that sums over K stay inside it.
The tile lives in registers between the load and the store. Everything is float32 on CUDA cores: a
step moves 8 bytes for a few operations, so tensor cores would gain nothing and cost exactness.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import chip

WIDTH = 16  # K and V are padded to a multiple: 4 warps of at least 4 rows, 8 threads of 2 columns
WIDEST_KEY = 256  # rows that a block keeps in registers
MOST_BLOCKS = 65535  # along the second and the third axis of a grid
TILES = (16, 32, 64)  # columns of the state that a block can have


def state_obstacle(state) -> str | None:
  """Why no kernel can update `state`, an array of at least two axes, in place; or None."""
  if state.dtype != jnp.float32:
    return f"the state is {state.dtype}; the kernel takes float32"
  if 0 in state.shape:
    return f"the state {state.shape} has an empty axis"
  if not jax.typeof(state).manual_axis_type.empty:
    return (
      "the state varies along a mesh axis of `shard_map`, which JAX refuses for in-place kernels; "
      "use check_vma=False"
    )
  if max(state.shape[:2]) > MOST_BLOCKS:
    return f"the state {state.shape} is too large: a grid of blocks has at most {MOST_BLOCKS}"
  return None


def matrix_obstacle(kv) -> str | None:
  """The same for a state [B, H, K, V]."""
  if kv.shape[2] > WIDEST_KEY:
    return f"K={kv.shape[2]}; a block keeps all K rows in registers, which ends at {WIDEST_KEY}"
  return state_obstacle(kv)


def dtype_obstacle(**arrays) -> str | None:
  """Which of the arrays no kernel takes, or None."""
  for name, x in arrays.items():
    if x.dtype not in (jnp.bfloat16, jnp.float32):
      return f"{name} is {x.dtype}; the kernel takes bfloat16 and float32"
  return None


def fits(K: int, V: int) -> bool:
  """Whether a state [..., K, V] needs no padding, which would copy it."""
  return K % WIDTH == 0 and V % WIDTH == 0


def value_tile(B: int, H: int, V: int) -> int:
  """Columns of the state in a block, for V a multiple of 16.

  32 float32 are the 128 bytes that memory likes to move. 16 halve the work of a block, which pays
  when there are fewer blocks than multiprocessors.
  """
  return 16 if V % 32 or B * H * (V // 32) < chip.MULTIPROCESSORS else 32


def padded(x, *last: int):
  """`x` with zeros behind its last axes."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - len(last)) + [(0, n) for n in last])


class Tile:
  """How the 128 threads of a block share a tile [K, columns] of a state.

  A thread has 4 columns (16 bytes) of a row, or 2 if four warps would then exceed K; a warp covers
  whole rows, the warps lie one above another.
  """

  def __init__(self, K: int, columns: int):
    self.shape = K, columns
    vector = 4 if K % (4 * 32 * 4 // columns) == 0 else 2
    rows = 32 * vector // columns  # of one warp
    tiling = plgpu.Tiling(((4 * rows, columns), (rows, columns), (vector,)))
    self.layout = plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    self.by_key, self.by_value = self.layout.reduce(1), self.layout.reduce(0)

  def load(self, ref):
    """A tile [K, columns] of device memory, as float32."""
    return _load(ref, self.layout)

  def keys(self, ref):
    """A vector [K]."""
    return _load(ref, self.by_key)

  def values(self, ref):
    """A vector [columns]."""
    return _load(ref, self.by_value)

  def across(self, keys):
    """A vector [K], repeated along the columns."""
    return self._repeated(keys, 0)

  def down(self, values):
    """A vector [columns], repeated along the rows."""
    return self._repeated(values, 1)

  def read(self, keys, state):
    """keys^T state, a vector [columns]."""
    return jnp.sum(self.across(keys) * state, axis=0)

  def _repeated(self, vector, axis):
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, self.shape, [axis]), self.layout)


def _load(ref, layout):
  # `optimized` is about bank conflicts of shared memory; these are loads from device memory.
  return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def run(body, inputs, kv, out_type, *, columns, name, interpret):
  """Runs `body(tile, inputs, place, kv, *outs)` for every tile of `kv`: (outs, the new kv).

  Args:
    body: gets the `Tile`; references to `inputs`; (b, h, columns of the tile, its number); the
      reference of the tile, to be read and written; references to what `out_type` describes.
    kv: [B, H, K, V]; its buffer becomes that of the result.
  """
  B, H, K, V = kv.shape
  tile = Tile(K, columns)

  def block(inputs, kv_ref, *outs):
    b, h, t = (lax.axis_index(name) for name in ("batch", "head", "tile"))
    here = pl.ds(t * columns, columns)
    body(tile, inputs, (b, h, here, t), kv_ref.at[b, h, :, here], *outs)

  # `plgpu.kernel` has no way to name aliases; a mutable reference becomes one.
  kv_ref = jax.new_ref(kv)
  step = plgpu.kernel(
    block,
    out_type=tuple(out_type),
    grid=(V // columns, H, B),
    grid_names=("tile", "head", "batch"),
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    interpret=interpret,
    kernel_name=name,
  )
  outs = step(inputs, kv_ref)
  return outs, jax.freeze(kv_ref)

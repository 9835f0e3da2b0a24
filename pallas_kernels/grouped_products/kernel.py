"""Products of sorted rows with the matrix of their group, by JAX's own kernels for Hopper.

    forward    y = x W_g for the rows x of group g
    backward   dx = dy W_g^T      dW_g = sum over the rows of group g of x^T dy

`jax.experimental.pallas.ops.gpu` has both; groups begin at any row, and may be empty. Sums are
float32, results bfloat16.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.core.gradients import custom_vjp, no_gradient
from pallas_kernels.core.wgmma import traced_once

_MIN_ROWS = 128  # per group, on average: a tile of a group that has fewer multiplies others, too
_MAX_GROUPS = 64  # each tile looks for its group among all of them
_ALIGNED = 64
_STAGES = 4


@functools.cache
def _library() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
  """JAX's `ragged_dot` and `transposed_ragged_dot`; None where this JAX has others."""
  try:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    found = ragged_dot_mgpu.ragged_dot, transposed_ragged_dot_mgpu.transposed_ragged_dot
    sizes = dict.fromkeys(("group_sizes", *_tiles(_ALIGNED, _ALIGNED)))
    inspect.signature(found[0]).bind(None, None, transpose_rhs=False, **sizes)
    inspect.signature(found[1]).bind(None, None, **sizes)
  except (ImportError, AttributeError, TypeError):
    return None
  return found


def _tiles(m: int, n: int) -> dict[str, int]:
  """Sizes of tiles of results whose sides are multiples of `m` and `n`."""
  largest = lambda size: 128 if size % 128 == 0 else 64
  sizes = {"block_m": largest(m), "block_n": largest(n), "block_k": 64}
  # All columns of a tile's rows one after the other: rows stay in the L2 cache, and the matrix of
  # the group, too. Row after row of one column, each column would read all rows from GMEM.
  columns = n // sizes["block_n"]
  return sizes | {"max_concurrent_steps": _STAGES, "grid_block_n": columns}


def unsupported(rows: int, groups: int, widths: tuple[int, ...], dtype: Any) -> str | None:
  """Why Hopper's kernels do not multiply `rows` rows with matrices of these widths, or None."""
  if dtype != jnp.bfloat16:
    return f"the kernels multiply bfloat16, and not {dtype}"
  if any(width % _ALIGNED for width in widths):
    return f"widths {widths} must be multiples of {_ALIGNED}"
  if groups > _MAX_GROUPS or rows < groups * _MIN_ROWS:
    return (
      f"{rows} rows of {groups} experts, and the kernels need {_MIN_ROWS} rows for each of at most "
      f"{_MAX_GROUPS}"
    )
  return None if _library() else f"JAX {jax.__version__} has no such kernels"


@custom_vjp
def grouped_product(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
  """[R, F] of x [R, D] and matrices [G, D, F], all bfloat16: groups of `sizes`, of sum R, rows."""
  return _product(x, matrices, sizes)


def _launch(x, matrices, sizes, transposed):
  width = matrices.shape[1 if transposed else 2]
  tiles = _tiles(128, width)  # a group has any number of rows
  library = _library()
  assert library is not None
  return library[0](x, matrices, group_sizes=sizes, transpose_rhs=transposed, **tiles)


# One after the other under `jax.vmap`: the kernels of JAX cannot be batched.
@jax.custom_batching.sequential_vmap
@traced_once()
def _product(x, matrices, sizes):
  return _launch(x, matrices, sizes, transposed=False)


@jax.custom_batching.sequential_vmap
@traced_once()
def _product_transposed(dy, matrices, sizes):
  return _launch(dy, matrices, sizes, transposed=True)


@jax.custom_batching.sequential_vmap
@traced_once()
def _gradient(x, dy, sizes):
  library = _library()
  assert library is not None
  return library[1](x, dy, group_sizes=sizes, **_tiles(x.shape[1], dy.shape[1]))


def _backward(residuals, dy):
  x, matrices, sizes = residuals
  dx = _product_transposed(dy, matrices, sizes)
  return dx, _gradient(x, dy, sizes), no_gradient(sizes)


grouped_product.defvjp(lambda *given: (_product(*given), given), _backward)

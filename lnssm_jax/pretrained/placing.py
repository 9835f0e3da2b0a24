"""Parameters out of memory-mapped tensors: transposed, converted and stacked, then placed.

Several threads copy, each tensor once, into the memory that the array on a CPU keeps.
"""

import math
import os
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from lnssm_jax import sharding
from lnssm_jax.pretrained import folders, safetensors
from lnssm_jax.pretrained.families.layers import Parameter
from lnssm_jax.pretrained.manifest import ExportError

_ALIGNMENT = 64  # bytes; an array of other alignment is copied again when it is placed on a CPU
_BLOCK = 1 << 20  # bytes that are transposed at once, which the cache of a core holds
_PADDING = 32  # numbers
_SLAB = 4096  # rows or columns that one thread copies
_CHUNK = 1 << 20  # numbers that one thread checks


def shardings(abstract: Any, mesh: Mesh | None) -> Any:
  """Where each parameter goes: to the first device, or its shards over a mesh."""
  if mesh is not None:
    return sharding.shardings(abstract, mesh)
  one = SingleDeviceSharding(jax.local_devices()[0])
  return jax.tree.map(lambda _: one, abstract)


def threads() -> ThreadPoolExecutor:
  """The threads for `read`; more than a few do not read faster."""
  return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


def read(
  parameter: Parameter, tensors: folders.Tensors, dtype: Any, where: Any, pool: Executor
) -> jax.Array:
  """A parameter on its devices; each shard is read for itself.

  Args:
    dtype: None leaves it as stored.

  Raises:
    ExportError: its tensors have several dtypes, and none is given, or numbers are not finite.
  """
  kinds = {tensors.dtypes[p.theirs] for pieces in parameter.layers for p in pieces}
  if dtype is None and len(kinds) > 1:
    raise ExportError(
      f"the tensors of {parameter.name} have the dtypes {', '.join(sorted(kinds))}; give a "
      "param_dtype for all."
    )
  dtype = np.dtype(min(kinds) if dtype is None else dtype)

  def shard(index):
    jobs = []
    if parameter.stacked:
      chosen, inner = parameter.layers[index[0]], index[1:]
    else:
      chosen, inner = parameter.layers, index
    shape = parameter.shape[1:] if parameter.stacked else parameter.shape
    size = tuple(len(range(*cut.indices(n))) for cut, n in zip(inner, shape, strict=True))
    out = _aligned((len(chosen), *size), dtype)
    for pieces, to in zip(chosen, out, strict=True):
      if not pieces:
        to[...] = 0
        continue
      if pieces[0].part is None:
        jobs += _slabs(to, pieces[0].view(tensors[pieces[0].theirs])[inner])
        continue
      whole = np.empty(shape, dtype)
      for piece in pieces:
        copy(whole if piece.part is None else piece.part(whole), piece.view(tensors[piece.theirs]))
      jobs.append((to, whole[inner]))
    list(pool.map(lambda job: copy(*job), jobs))
    for pieces, to in zip(chosen, out, strict=True):
      if not all(
        pool.map(safetensors.is_finite, np.array_split(to.reshape(-1), 1 + to.size // _CHUNK))
      ):
        names = " or ".join(piece.theirs for piece in pieces)
        raise ExportError(
          f"{names} has numbers that are NaN or infinite as {dtype}; the file is damaged, its "
          "training has failed, or they need a wider param_dtype."
        )
    return out if parameter.stacked else out[0]

  return jax.make_array_from_callback(parameter.shape, where, shard)


def copy(to: np.ndarray, source: np.ndarray) -> None:
  """`to[...] = source`, several times faster for large matrices that are transposed.

  NumPy transposes by reading one number of each row, rows 2^n bytes apart, of which a cache keeps
  few. Some rows are copied next to each other first, apart by another distance. Four numbers of
  16 bits at once, or blocks that XLA transposes in `device_put`, are not faster.
  """
  if to.dtype == source.dtype:  # copies of bits are faster than those of bfloat16
    bits = f"u{to.itemsize}"
    to, source = to.view(bits), source.view(bits)
  if source.ndim != 2 or source.strides[0] >= source.strides[1]:
    with np.errstate(over="ignore"):  # `read` finds what is beyond the dtype
      to[...] = source
    return
  rows = source.T
  count = max(64, _BLOCK // (rows.shape[1] * to.itemsize))
  block = np.empty((count, rows.shape[1] + _PADDING), to.dtype)
  for begin in range(0, len(rows), count):
    some = rows[begin : begin + count]
    near = block[: len(some), :-_PADDING]
    with np.errstate(over="ignore"):
      near[...] = some
    to[:, begin : begin + count] = near.T


def _slabs(to, source):
  """The copy of a large array as several, along its longest axis."""
  axis = int(np.argmax(to.shape))
  cut = lambda begin: (slice(None),) * axis + (slice(begin, begin + _SLAB),)
  return [(to[cut(n)], source[cut(n)]) for n in range(0, to.shape[axis], _SLAB)]


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  size = math.prod(shape) * dtype.itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  begin = -memory.ctypes.data % _ALIGNMENT
  return memory[begin : begin + size].view(dtype).reshape(shape)

"""Numbers about arrays, with sums in float64, block by block: no copy of an array is made."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

_BLOCK = 1 << 19  # elements
NEAR_ZERO = 1e-3  # of the rms


def statistics(x: np.ndarray) -> dict[str, Any]:
  """norm, rms and largest magnitude of the finite numbers; the share near zero; the rest's number.

  Near zero is at most `NEAR_ZERO` times the rms.
  """
  count, squares, largest = 0, 0.0, 0.0
  for block in _blocks(x):
    square = _square(block)
    if not math.isfinite(square):
      block = block[np.isfinite(block)]
      square = _square(block)
    count, squares = count + block.size, squares + square
    largest = max(largest, float(block.max(initial=0)), -float(block.min(initial=0)))
  rms = math.sqrt(squares / count) if count else 0.0
  is_small = lambda block: np.abs(block) <= block.dtype.type(NEAR_ZERO * rms)
  small = sum(int(np.count_nonzero(is_small(block))) for block in _blocks(x))
  return {
    "norm": math.sqrt(squares),
    "rms": rms,
    "largest": largest,
    "near_zero": small / x.size if x.size else 0.0,
    "non_finite": x.size - count,
  }


def difference(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
  """norm of x - y, relative to that of y, its largest magnitude, and the share of changed numbers.

  Numbers that are not finite in x or y count as changed, and as nothing else.
  """
  squares, reference, largest, changed = 0.0, 0.0, 0.0, 0
  for a, b in zip(_blocks(x), _blocks(y), strict=True):
    same = a == b
    changed += a.size - int(same.sum())
    delta = np.subtract(a, b, dtype=np.float64)
    if not math.isfinite(square := _square(delta)):
      delta = np.where(np.isfinite(delta), delta, 0.0)
      square = _square(delta)
    if not math.isfinite(square_of_b := _square(b)):
      square_of_b = _square(np.where(np.isfinite(b), b, 0.0))
    squares, reference = squares + square, reference + square_of_b
    largest = max(largest, float(np.abs(delta).max()))
  norm = math.sqrt(squares)
  return {
    "norm": norm,
    "relative": norm / math.sqrt(reference) if reference > 0 else None,
    "largest": largest,
    "changed": changed / x.size if x.size else 0.0,
  }


def _square(block: np.ndarray) -> float:
  """The sum of squares, in float64.

  Not `wide @ wide`: blocks are in several threads, and those of BLAS would wait for each other.
  """
  return float(np.einsum("i,i->", block, block, dtype=np.float64))


def _blocks(x: np.ndarray) -> Iterator[np.ndarray]:
  """Flat blocks of an array, float32 or float64 without rounding; of complex numbers both parts."""
  flat = x.reshape(-1)
  if np.iscomplexobj(flat):
    flat = flat.view(flat.real.dtype)
  is_short_float = flat.dtype.kind not in "biu" and flat.dtype.itemsize <= 4
  dtype = np.float32 if is_short_float else np.float64
  for start in range(0, flat.size, _BLOCK):
    yield flat[start : start + _BLOCK].astype(dtype, copy=False)

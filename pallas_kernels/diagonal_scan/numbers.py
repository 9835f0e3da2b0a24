"""Numbers as tuples of their parts: (real,) or (real, imaginary)."""

from typing import Any

Parts = tuple[Any, ...]  # of a number: arrays, references or dtypes


def conjugate(number):
  """The complex conjugate."""
  return [number[0], *(-y for y in number[1:])]


def add(y, z):
  """y + z, with as many parts as the longer has."""
  longer, shorter = (y, z) if len(y) >= len(z) else (z, y)
  return [*(p + q for p, q in zip(longer, shorter, strict=False)), *longer[len(shorter) :]]


def times(y, z):
  """y z."""
  if len(y) == 1:
    return [y[0] * part for part in z]
  if len(z) == 1:
    return [part * z[0] for part in y]
  return [y[0] * z[0] - y[1] * z[1], y[0] * z[1] + y[1] * z[0]]

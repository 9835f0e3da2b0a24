"""Lengths that are symbols of `jax.export`: one program for many lengths."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.export import is_symbolic_dim

# Lengths that are symbols are multiples of it, and so of every default chunk.
UNIT = 512


@contextlib.contextmanager
def naming_length(name: str, inputs: Any) -> Iterator[None]:
  """Turns the failure of a computation on a length that is a symbol into an error that names it.

  Args:
    inputs: a tree of arrays, those over time [B, T, ...].

  Raises:
    NotImplementedError: the computation needs to know the length, or more of it.
  """
  try:
    yield
  except ValueError:
    raise  # of a check
  except Exception as error:
    shapes = [jax.numpy.shape(leaf) for leaf in jax.tree.leaves(inputs)]
    lengths = [shape[1] for shape in shapes if len(shape) > 1 and is_symbolic_dim(shape[1])]
    if not lengths or "jax.export.symbolic_shape" in str(error):
      raise
    raise NotImplementedError(
      f"{name}: the length {lengths[0]} is a symbol that this computation cannot have; symbols are "
      f"multiples of {UNIT}, of jax.export.symbolic_shape('b, {UNIT}*n'). If this one is, export "
      "each length by itself; a mixer may set needs_length (docs/own_models.md)."
    ) from error

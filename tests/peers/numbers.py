"""The numbers that both sides of a comparison start from: the same for the same name, everywhere.

Both environments import this, so it needs NumPy only, and takes no generator of random numbers that
another version may change.
"""

import hashlib
import math

import numpy as np

B, T, DIM = 2, 6, 8


def numbers(name: str, shape) -> np.ndarray:
  """Uniform numbers of mean 0 and variance 1, float64."""
  count = math.prod(shape)
  words = np.frombuffer(hashlib.shake_256(name.encode()).digest(8 * count), "<u8")
  return (math.sqrt(3) * (2.0 * (words >> np.uint64(11)) / 2.0**53 - 1)).reshape(shape)


def parameter(case: str, name: str, shape) -> np.ndarray:
  """A parameter of the other side's layer; matrices are [outputs, inputs] there."""
  size = 0.5 if len(shape) < 2 else shape[-1] ** -0.5
  return size * numbers(f"{case}/{name}", shape)


def inputs(case: str) -> np.ndarray:
  """x [B, T, DIM], with a token so small that the epsilons of norms show."""
  x = numbers(f"{case}/inputs", (B, T, DIM))
  x[:, 3] *= 3e-3
  return x


def cotangent(case: str) -> np.ndarray:
  """The weights [B, T, DIM] of the outputs in the sum that is differentiated."""
  return numbers(f"{case}/cotangent", (B, T, DIM))

"""Errors of an implementation against its op's reference in float64, for tests and benchmarks.

An error is the distance to the reference divided by the reference, both as Euclidean norms over the
whole tensor.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


def tolerance(dtype, length: int) -> float:
  """16 roundings of `dtype`, and one more for every doubling of the length.

  Single results stay within a few roundings. Gradients of the normalized form need the
  rest: there two terms of similar size are subtracted.
  """
  return float(jnp.finfo(dtype).eps * (16 + np.log2(length)))


def relative_error(got, want) -> float:
  """||got - want|| / ||want||, or the norm itself where `want` is 0. NaN passes no comparison."""
  wide = lambda x: x.astype(np.result_type(x.dtype, np.float64))
  got, want = (wide(np.asarray(x)) for x in (got, want))
  if got.shape != want.shape:
    raise AssertionError(f"shape {got.shape}, but the reference has {want.shape}")
  norm = np.linalg.norm(want)
  return float(np.linalg.norm(got - want) / (norm if norm > 0 else 1.0))


def round_to(inputs: Tree, dtype) -> Tree:
  """The inputs as `dtype` holds them, in float64, so that both sides see the same numbers."""
  narrow = lambda x: np.asarray(x, np.float32).astype(dtype)  # twice rounded, as JAX does
  return jax.tree.map(lambda x: narrow(x).astype(np.float64), inputs)


def with_gradients(fn: Callable[[Tree], Tree], *, seed: int = 0) -> Callable[[Tree], Tree]:
  """A function of the same inputs: `fn`, and the gradient of a random linear functional.

  The functional is of all that `fn` returns; its weights are multiples of 1/8, which every dtype
  holds exactly.
  """

  def functional(inputs):
    outputs, rng = fn(inputs), np.random.default_rng(seed)
    weights = jax.tree.map(
      lambda y: (np.round(8 * rng.normal(size=y.shape)) / 8).astype(y.dtype), outputs
    )
    products = jax.tree.map(lambda y, w: jnp.sum(y.astype(w.dtype) * w), outputs, weights)
    return sum(p.astype(jnp.result_type(float)) for p in jax.tree.leaves(products)), outputs

  def both(inputs):
    (_, outputs), gradients = jax.value_and_grad(functional, has_aux=True)(inputs)
    return {"values": outputs, "gradients": gradients}

  return both


def values_and_gradients(fn: Callable[[Tree], Tree], inputs: Tree) -> Tree:
  """`fn(inputs)` and its gradients as in `with_gradients`, by one compiled program."""
  return jax.jit(with_gradients(fn))(inputs)


def named_errors(got: Tree, want: Tree) -> dict[str, float]:
  """The relative error of every array, by its path."""
  errors = jax.tree.map(relative_error, got, want)
  if all(isinstance(name, str) and name.startswith("[") for name in errors):
    return errors
  return {jax.tree_util.keystr(path): e for path, e in jax.tree_util.tree_leaves_with_path(errors)}

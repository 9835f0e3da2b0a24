"""What every scan is held to: its reference in float64, all gradients included.

An error is the distance to the reference in relation to the reference, both as Euclidean norms over
the whole tensor. The one tolerance rule is `tolerance`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


def tolerance(dtype, length: int) -> float:
  """16 roundings of `dtype`, and one more for every doubling of the length.

  Single results stay within a few roundings. The room is for gradients of the normalised form,
  where two terms of similar size are subtracted.
  """
  return float(jnp.finfo(dtype).eps * (16 + np.log2(length)))


def relative_error(got, want) -> float:
  """||got - want|| / ||want||, or the norm itself where `want` is 0. NaN passes no comparison."""
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  if got.shape != want.shape:
    raise AssertionError(f"shape {got.shape}, but the reference has {want.shape}")
  norm = np.linalg.norm(want)
  return float(np.linalg.norm(got - want) / (norm if norm > 0 else 1.0))


def round_to(inputs: Tree, dtype) -> Tree:
  """The inputs as `dtype` holds them, in float64, so that both sides see the same numbers."""
  return jax.tree.map(lambda x: np.asarray(jnp.asarray(x, dtype), np.float64), inputs)


def with_gradients(fn: Callable[[Tree], Tree], inputs: Tree, *, seed: int = 0):
  """A function of inputs shaped like these: `fn`, and the gradient of a random linear functional.

  The functional is of all that `fn` returns; its weights are multiples of 1/8, which every dtype
  holds exactly.
  """
  shapes = jax.eval_shape(fn, inputs)
  rng = np.random.default_rng(seed)
  weights = jax.tree.map(
    lambda s: (np.round(8 * rng.normal(size=s.shape)) / 8).astype(s.dtype), shapes
  )

  def functional(inputs):
    outputs = fn(inputs)
    products = jax.tree.map(lambda y, w: jnp.sum(y.astype(w.dtype) * w), outputs, weights)
    return sum(p.astype(jnp.result_type(float)) for p in jax.tree.leaves(products)), outputs

  def both(inputs):
    (_, outputs), gradients = jax.value_and_grad(functional, has_aux=True)(inputs)
    return {"values": outputs, "gradients": gradients}

  return both


def values_and_gradients(fn: Callable[[Tree], Tree], inputs: Tree) -> Tree:
  """`fn(inputs)` and its gradients as in `with_gradients`, by one compiled program."""
  return jax.jit(with_gradients(fn, inputs))(inputs)


def named_errors(got: Tree, want: Tree) -> dict[str, float]:
  """The relative error of every array, by its path."""
  errors = jax.tree.map(relative_error, got, want)
  return {jax.tree_util.keystr(path): e for path, e in jax.tree_util.tree_leaves_with_path(errors)}


def assert_small(errors: dict[str, float], dtype, length: int) -> None:
  """Asserts that errors by path (of `named_errors`) are within `tolerance`.

  Values of dtypes narrower than float32 within two roundings, because sums are float32 everywhere:
  the room for gradients once hid a state that had passed a border of segments.
  """
  limit = values = tolerance(dtype, length)
  if jnp.dtype(dtype).itemsize < 4:
    values = 2 * float(jnp.finfo(dtype).eps)
  limits = {name: values if name.startswith("['values']") else limit for name in errors}
  too_large = {name: error for name, error in errors.items() if not error <= limits[name]}  # or NaN
  assert not too_large, f"limits {values:.1e} of values, {limit:.1e} of gradients: {too_large}"


def errors_against_reference(
  fn: Callable[[Tree, str], Tree], inputs: Tree, dtypes: Tree, implementation: str
) -> dict[str, float]:
  """Errors of every output and gradient of `fn(inputs, implementation)`, by name.

  `inputs` are float64 arrays; each is rounded to its dtype in `dtypes` for both sides of the
  comparison.
  """
  inputs = jax.tree.map(round_to, inputs, dtypes)
  with jax.enable_x64(True):
    exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), inputs)
    want = jax.tree.map(np.asarray, values_and_gradients(lambda x: fn(x, "reference"), exact))
  passed = jax.tree.map(jnp.asarray, inputs, dtypes)
  got = jax.tree.map(np.asarray, values_and_gradients(lambda x: fn(x, implementation), passed))
  return named_errors(got, want)

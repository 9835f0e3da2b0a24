"""The contract of every implementation of every op: its reference in float64, with all gradients.

Values and gradients have limits of their own: the room that gradients need once hid a state that
had crossed a document boundary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.core.accuracy import (
  named_errors,
  relative_error,
  round_to,
  tolerance,
  values_and_gradients,
  with_gradients,
)
from tests.ops.cases import SCANS
from tests.ops.checked import Check

__all__ = [
  "assert_small",
  "by_path",
  "errors_against_reference",
  "errors_of",
  "in_float64",
  "named_errors",
  "reference_of",
  "relative_error",
  "round_to",
  "tolerance",
  "value_limit",
  "values_and_gradients",
  "with_gradients",
]


def value_limit(dtype, length: int) -> float:
  """The limit of values in the default checks.

  Two roundings of dtypes narrower than float32, because sums are float32 everywhere. Of float32 a
  few: measured are 2 at most, and 8 at T = 1000 with a weak constant decay.
  """
  roundings = 2 if jnp.dtype(dtype).itemsize < 4 else 4 + np.log2(length)
  return float(jnp.finfo(dtype).eps * roundings)


def by_path(tree: Any) -> dict[str, np.ndarray]:
  """The arrays of a tree by their paths."""
  paths = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): np.asarray(x) for path, x in paths}


def errors_against_reference(
  fn: Callable[[Any, str], Any], inputs: Any, dtypes: Any, implementation: str
) -> dict[str, float]:
  """Errors of every output and gradient of `fn(inputs, implementation)`, by name.

  `inputs` are float64 arrays; each is rounded to its dtype in `dtypes` for both sides of the
  comparison.
  """
  inputs = jax.tree.map(round_to, inputs, dtypes)
  want = in_float64(with_gradients(lambda x: fn(x, "reference")), inputs)
  passed = jax.tree.map(jnp.asarray, inputs, dtypes)
  return named_errors(by_path(values_and_gradients(lambda x: fn(x, implementation), passed)), want)


def in_float64(fn: Callable[[Any], Any], inputs: Any) -> dict[str, np.ndarray]:
  """`fn(inputs)` by path, computed in float64. `fn` may be compiled already."""
  with jax.enable_x64(True):
    return by_path(jax.jit(fn)(jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), inputs)))


def assert_small(
  errors: dict[str, float], dtype, length: int, *, strength: str = "", values: float | None = None
) -> None:
  """Asserts that errors by path (of `named_errors`) are within `tolerance`.

  Values of dtypes narrower than float32 within two roundings, because sums are float32 everywhere;
  or all within the limit `values`. With slow decays, `strength` "weak", "lasting" or, of most
  channels, "uneven", gradients of such dtypes within four, for they are sums over many tokens of
  which one dropped term is a small part. (Those with fast decays subtract terms of similar size.)
  """
  limit = tolerance(dtype, length)
  narrow = jnp.dtype(dtype).itemsize < 4
  rounding = float(jnp.finfo(dtype).eps)
  if values is None:
    values = 2 * rounding if narrow else limit
  if narrow and strength in ("weak", "lasting", "uneven"):
    limit = 4 * rounding
  limits = {name: values if name.startswith("['values']") else limit for name in errors}
  too_large = {name: error for name, error in errors.items() if not error <= limits[name]}  # or NaN
  assert not too_large, f"limits {values:.1e} of values, {limit:.1e} of gradients: {too_large}"


def assert_case(scan, case, dtype, implementation: str, inputs=None) -> None:
  """An implementation has the values and gradients of the reference in float64 on a case.

  Inputs that may be narrow have this dtype. `inputs` (float64) may be others than those of the
  case. Compiled for this call alone: a test may have changed what the program depends on.
  """
  inputs = scan.inputs(case) if inputs is None else inputs
  call = lambda x, form: scan.compared(*scan(case, x, implementation=form))
  errors = errors_against_reference(call, inputs, dtypes_of(scan, inputs, dtype), implementation)
  assert_small(errors, dtype, case.T, strength=case.strength)


def dtypes_of(scan, inputs, dtype) -> dict:
  """`dtype` for inputs that may be narrow, float32 for the others."""
  return {n: dtype if n in scan.narrow else jnp.float32 for n in inputs}


def inputs_of(name: str, check: Check) -> tuple[dict[str, np.ndarray], dict]:
  """The inputs of a check in float64, rounded to the dtypes that they are passed in."""
  scan = SCANS[name]
  inputs = scan.inputs(check.case)
  dtypes = dtypes_of(scan, inputs, check.dtype)
  return jax.tree.map(round_to, inputs, dtypes), dtypes


@functools.cache
def program(name: str, case, implementation: str):
  """Values and gradients of an implementation, compiled once for all cases of equal shapes."""
  scan = SCANS[name]
  return jax.jit(
    with_gradients(lambda x: scan.compared(*scan(case, x, implementation=implementation)))
  )


def reference_case(name: str, case):
  """The case that stands for all whose reference is the same program: it has no chunks."""
  return dataclasses.replace(SCANS[name].program_of(case), chunk=None)


def reference_of(name: str, case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Values and gradients of the reference in float64, by path."""
  return in_float64(program(name, reference_case(name, case), "reference"), inputs)


def errors_of(name: str, check: Check, want: dict[str, np.ndarray] | None = None):
  """The errors of every value and gradient of a check, by path."""
  inputs, dtypes = inputs_of(name, check)
  if want is None:
    want = reference_of(name, check.case, inputs)
  run = program(name, SCANS[name].program_of(check.case), check.implementation)
  got = by_path(run(jax.tree.map(jnp.asarray, inputs, dtypes)))
  return named_errors(_with_complex(got), _with_complex(want))


def _with_complex(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The arrays, of which "x" and "x_i" are one complex array: a gradient may have a small part."""
  parts = {name: name.removesuffix("']") + "_i']" for name in arrays}
  found = {}
  for name, x in arrays.items():
    if (other := parts[name]) in arrays:
      found[name] = np.asarray(x, np.float64) + 1j * np.asarray(arrays[other], np.float64)
    elif name not in parts.values():
      found[name] = x
  return found

"""selective_scan, every implementation: values and gradients against float64."""

import itertools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.ops.selective_scan.api import selective_scan
from lnssm_jax.ops.selective_scan.state import SelectiveState
from tests.ops import contract

B = 2


@dataclass(frozen=True)
class Case:
  """One set of arguments."""

  T: int = 37
  strength: str = "ordinary"
  segments: bool = False
  skip: bool = True
  D: int = 3
  N: int = 5
  chunk: int | None = 4

  def __str__(self):
    flags = [name for name in ("segments", "skip") if getattr(self, name)]
    return "-".join([self.strength, f"T{self.T}D{self.D}N{self.N}C{self.chunk}", *flags])


# Lengths on both sides of a chunk's border, every strength with and without segments.
CASES = [
  Case(1, "extreme", chunk=None),
  Case(2, "weak", segments=True, chunk=None),
  Case(15, "ordinary", segments=True, skip=False),
  Case(37, "extreme", segments=True),
  Case(37, "weak", segments=True, skip=False),
  Case(37, "extreme", D=1, N=7),
  Case(63, "weak", chunk=None),
  Case(64, "ordinary", N=1),
  Case(65, "extreme", segments=True, chunk=None),
  Case(1000, "same", chunk=None),
]
MANY = [
  Case(T, strength, segments, skip, D, N, chunk)
  for strength, segments, skip, (T, D, N, chunk) in itertools.product(
    ("weak", "ordinary", "extreme"),
    (False, True),
    (False, True),
    [(1, 1, 1, None), (2, 3, 2, 1), (63, 5, 3, 8), (64, 4, 16, 64), (130, 2, 9, None)],
  )
]


def steps_and_rates(rng, case: Case):
  """`dt` and `a` with dt a weak (near 0), ordinary (as initialised), or extreme: -40 to 0.

  Or the same small dt everywhere: a decay that is rounded to float32 is then wrong a thousand
  times.
  """
  T, D, N = case.T, case.D, case.N
  a = -np.exp(rng.normal(size=(D, N)))
  if case.strength == "same":
    return np.full((B, T, D), 1e-6), a
  if case.strength == "weak":
    return np.exp(rng.uniform(-9, -6, size=(B, T, D))), a
  if case.strength == "ordinary":
    return np.exp(rng.uniform(-6, 0, size=(B, T, D))), a
  dt = rng.random((B, T, D)) ** 2
  dt.flat[0], dt.flat[-1] = 1, 0
  return dt, -40 * rng.random((D, N))


def make_inputs(case: Case, seed: int = 0):
  rng = np.random.default_rng(seed)
  T, D, N = case.T, case.D, case.N
  dt, a = steps_and_rates(rng, case)
  inputs = {"x": rng.normal(size=(B, T, D)), "dt": dt, "a": a}
  inputs |= {name: rng.normal(size=(B, T, N)) for name in ("b", "c")}
  inputs["ssm"] = rng.normal(size=(B, D, N))
  if case.skip:
    inputs["skip"] = rng.normal(size=D)
  return inputs


def segment_ids(case: Case):
  """Ids that change often, at the last step too, skip numbers and come back to an earlier one."""
  if not case.segments:
    return None
  changes = np.random.default_rng(1).random((B, case.T)) < 0.15
  changes[0, -1] = True
  return jnp.asarray(3 * (np.cumsum(changes, axis=1) % 2), jnp.int32)


def call(case: Case, inputs, implementation):
  out, state = selective_scan(
    *(inputs[name] for name in ("x", "dt", "a", "b", "c")),
    skip=inputs.get("skip"),
    initial_state=SelectiveState(inputs["ssm"]),
    segment_ids=segment_ids(case),
    implementation=implementation,
    chunk_size=case.chunk,
  )
  return {"out": out, "state": state}


def check(case: Case, implementation: str, dtype):
  inputs = make_inputs(case)
  dtypes = {n: dtype if n in ("x", "dt", "b", "c") else jnp.float32 for n in inputs}
  errors = contract.errors_against_reference(
    lambda x, name: call(case, x, name), inputs, dtypes, implementation
  )
  limit = contract.tolerance(dtype, case.T)
  too_large = {name: error for name, error in errors.items() if not error <= limit}
  assert not too_large, f"limit {limit:.1e}: {too_large}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunked_float32(case):
  check(case, "chunked", jnp.float32)


@pytest.mark.parametrize("case", [CASES[3], CASES[6]], ids=str)
def test_associative_float32(case):
  check(case, "associative", jnp.float32)


@pytest.mark.parametrize(("case", "dtype"), [(CASES[3], jnp.bfloat16), (CASES[7], jnp.float16)])
def test_chunked_narrow(case, dtype):
  check(case, "chunked", dtype)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["chunked", "associative"])
@pytest.mark.parametrize("case", MANY, ids=str)
def test_every_combination(case, implementation):
  check(case, implementation, jnp.float32)

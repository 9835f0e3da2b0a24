"""longhorn_scan, every implementation: values and gradients against float64."""

import itertools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.ops.longhorn_scan.api import longhorn_scan
from lnssm_jax.ops.longhorn_scan.state import LonghornState
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


def strengths_and_keys(rng, case: Case):
  """`beta` and `k`: decays near 1 (weak), as trained (ordinary), or down to 1e-6 (extreme).

  Extreme keys have one entry that is nearly all of them, or are zero; beta comes near 0 and 1. Or
  small keys that are the same everywhere: a decay that is rounded to float32 is then wrong a
  thousand times.
  """
  T, D, N = case.T, case.D, case.N
  k, beta = rng.normal(size=(B, T, N)), 1 / (1 + np.exp(rng.normal(size=(B, T, D))))
  if case.strength == "weak":
    return beta, k / 50
  if case.strength == "same":
    return np.full(beta.shape, 0.5), np.full(k.shape, 1e-3)
  if case.strength == "ordinary":
    return beta, k
  k[np.arange(B)[:, None], np.arange(T), rng.integers(N, size=(B, T))] *= 1000
  k[:, ::5] = 0
  return 1 / (1 + np.exp(rng.normal(size=(B, T, D)) * 6)), k


def make_inputs(case: Case, seed: int = 0):
  rng = np.random.default_rng(seed)
  T, D, N = case.T, case.D, case.N
  beta, k = strengths_and_keys(rng, case)
  inputs = {"x": rng.normal(size=(B, T, D)), "beta": beta, "k": k}
  inputs |= {"q": rng.normal(size=(B, T, N)), "memory": rng.normal(size=(B, D, N))}
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
  out, state = longhorn_scan(
    *(inputs[name] for name in ("x", "beta", "k", "q")),
    skip=inputs.get("skip"),
    initial_state=LonghornState(inputs["memory"]),
    segment_ids=segment_ids(case),
    implementation=implementation,
    chunk_size=case.chunk,
  )
  return {"out": out, "state": state}


def check(case: Case, implementation: str, dtype):
  inputs = make_inputs(case)
  dtypes = {n: dtype if n in ("x", "beta", "k", "q") else jnp.float32 for n in inputs}
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

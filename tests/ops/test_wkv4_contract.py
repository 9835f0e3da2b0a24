"""wkv4, every implementation: values and gradients against float64.

A state is compared by what it stands for, the logarithm of its sum of weights and its mean: its
maximum is a scale, which may differ by a rounding.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.ops.wkv4.api import wkv4
from lnssm_jax.ops.wkv4.state import WKV4State
from tests.ops import contract

B = 2


@dataclass(frozen=True)
class Case:
  """One set of arguments; `keys` says how large they are."""

  T: int = 37
  D: int = 5
  strength: str = "ordinary"
  keys: str = "ordinary"
  segments: bool = False
  state: bool = True
  chunk: int | None = 4

  def __str__(self):
    flags = [name for name in ("segments", "state") if getattr(self, name)]
    sizes = f"T{self.T}D{self.D}C{self.chunk}"
    return "-".join([f"{self.strength}_decay", f"{self.keys}_keys", *flags, sizes])


# The lengths lie on both sides of a chunk's border; chunks of 64 are scanned, short ones are
# chains.
CASES = [
  Case(T=1),
  Case(T=2, keys="two", strength="weak"),
  Case(T=15, strength="extreme", segments=True),
  Case(T=63, strength="weak", keys="wide", chunk=7),
  Case(T=64, keys="wide", strength="extreme", segments=True),
  Case(T=65, keys="two", strength="extreme", segments=True, chunk=5),
  Case(T=64, state=False, strength="weak"),
  Case(T=130, keys="wide", strength="extreme", chunk=65),
  Case(T=128, segments=True, chunk=64),
  Case(T=1000, strength="weak"),
  Case(T=1000, keys="wide", strength="extreme"),
]
MANY = [
  Case(T, D, strength, keys, segments, state, chunk)
  for strength in ("weak", "ordinary", "extreme")
  for keys in ("ordinary", "wide", "two")
  for segments in (False, True)
  for state in (False, True)
  for T, D, chunk in [(63, 17, 16), (130, 8, 64)]
]


def make_inputs(case: Case, seed: int = 0):
  """Decays near 0, ordinary, or from 1e-7 to 20 a step; keys near 0, from -200 to 200, or +-200."""
  rng = np.random.default_rng(seed)
  T, D = case.T, case.D
  center = {"weak": -7, "ordinary": -1, "extreme": 0}[case.strength]
  rate = np.exp(rng.normal(size=D) + center)
  if case.strength == "extreme":
    rate[: D // 2 + 1] = np.geomspace(20, 1e-7, D // 2 + 1)
  keys = {
    "ordinary": lambda shape: rng.normal(size=shape),
    "wide": lambda shape: rng.uniform(-200, 200, size=shape),
    "two": lambda shape: 200 * rng.choice([-1, 1], size=shape) + rng.normal(size=shape),
  }[case.keys]
  inputs = {"k": keys((B, T, D)), "v": rng.normal(size=(B, T, D)), "decay_rate": rate}
  inputs["bonus"] = rng.normal(size=D)
  if case.state:
    inputs["max"] = keys((B, D))
    inputs["denominator"] = np.exp(rng.normal(size=(B, D)))
    inputs["numerator"] = inputs["denominator"] * rng.normal(size=(B, D))
  return inputs


def segment_ids(case: Case):
  """Ids that change often, skip numbers (an empty document) and come back to an earlier one."""
  if not case.segments:
    return None
  rng = np.random.default_rng(1)
  return jnp.asarray(3 * (np.cumsum(rng.random((B, case.T)) < 0.15, axis=1) % 2), jnp.int32)


def call(case: Case, inputs, implementation):
  out, state = wkv4(
    *(inputs[name] for name in ("k", "v", "decay_rate", "bonus")),
    initial_state=WKV4State(*(inputs[x] for x in WKV4State._fields)) if case.state else None,
    segment_ids=segment_ids(case),
    implementation=implementation,
    chunk_size=case.chunk,
  )
  log_weight = state.max + jnp.log(state.denominator)
  return {"out": out, "log_weight": log_weight, "mean": state.numerator / state.denominator}


def check(case: Case, implementation: str, dtype):
  inputs = make_inputs(case)
  dtypes = {name: dtype if name in ("k", "v") else jnp.float32 for name in inputs}
  errors = contract.errors_against_reference(
    lambda x, name: call(case, x, name), inputs, dtypes, implementation
  )
  limit = contract.tolerance(dtype, case.T)
  too_large = {name: error for name, error in errors.items() if not error <= limit}
  assert not too_large, f"limit {limit:.1e}: {too_large}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunked_float32(case):
  check(case, "chunked", jnp.float32)


@pytest.mark.parametrize("case", [CASES[3], CASES[5], CASES[8]], ids=str)
def test_associative_float32(case):
  check(case, "associative", jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_chunked_low_precision(dtype):
  check(CASES[4], "chunked", dtype)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["chunked", "associative"])
@pytest.mark.parametrize("case", MANY, ids=str)
def test_every_combination(case, implementation):
  check(case, implementation, jnp.float32)

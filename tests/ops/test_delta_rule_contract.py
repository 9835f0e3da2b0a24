"""delta_rule, every implementation: values and gradients against float64."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.ops.delta_rule.api import delta_rule
from lnssm_jax.ops.delta_rule.state import DeltaRuleState
from tests.ops import contract

B, H = 2, 2


@dataclass(frozen=True)
class Case:
  """One set of arguments. `rates`: beta per "head" or "column"; keys have length 1."""

  T: int = 37
  K: int = 5
  V: int = 7
  decay: str | None = None
  rates: str = "head"
  erase: bool = False
  segments: bool = False
  chunk: int | None = 16

  def __str__(self):
    flags = [name for name in ("erase", "segments") if getattr(self, name)]
    sizes = f"T{self.T}K{self.K}V{self.V}C{self.chunk}"
    return "-".join([self.rates, self.decay or "none", *flags, sizes])


CASES = [
  Case(T=65, chunk=None),
  Case(T=1000, K=8, V=3, decay="weak", segments=True, chunk=None),
  Case(T=64, decay="extreme", erase=True, chunk=None),
  Case(T=63, decay="ordinary", segments=True, erase=True),
  Case(T=15, decay="extreme", segments=True, chunk=4),
  Case(T=2, K=1, V=1, decay="ordinary"),
  Case(T=1, decay="ordinary", erase=True),
  Case(rates="column", decay="extreme", segments=True, erase=True),
  Case(rates="column", T=64, K=8, V=3, decay="weak", chunk=None),
  Case(rates="column", T=15, segments=True, chunk=4),
  Case(rates="column", T=1, decay="ordinary"),
]
MANY = [
  Case(T, K, V, decay, rates, erase, segments, chunk)
  for decay in (None, "weak", "ordinary", "extreme")
  for rates in ("head", "column")
  for erase in (False, True)
  for segments in (False, True)
  for T, K, V, chunk in [(3, 3, 1, None), (65, 17, 5, 32), (130, 8, 8, None), (1000, 16, 4, None)]
]


def log_decay(rng, strength: str, shape):
  """Log decays: weak (near 0), ordinary, or extreme: from -inf a step to 0, ends included."""
  if strength == "weak":
    return -np.exp(rng.normal(size=shape) - 7)
  if strength == "ordinary":
    return -np.exp(rng.normal(size=shape) - 1)
  decay = -20 * rng.random(shape) ** 2
  decay.flat[0], decay.flat[-1] = -20, 0
  return decay


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make_inputs(case: Case, seed: int = 0):
  rng = np.random.default_rng(seed)
  T, K, V = case.T, case.K, case.V
  inputs = {"q": rng.normal(size=(B, T, H, K)), "k": unit(rng.normal(size=(B, T, H, K)))}
  inputs |= {"v": rng.normal(size=(B, T, H, V)), "kv": rng.normal(size=(B, H, K, V))}
  inputs["beta"] = rng.random((B, T, H) if case.rates == "head" else (B, T, H, V))
  if case.erase:
    # Near the key, and short enough not to make the state grow.
    inputs["erase_key"] = unit(inputs["k"] + 0.2 * rng.normal(size=(B, T, H, K)))
  if case.decay:
    inputs["log_decay"] = log_decay(rng, case.decay, (B, T, H))
  return inputs


def segment_ids(case: Case):
  """Ids that change often, skip numbers (an empty document) and come back to an earlier one."""
  if not case.segments:
    return None
  rng = np.random.default_rng(1)
  return jnp.asarray(3 * (np.cumsum(rng.random((B, case.T)) < 0.15, axis=1) % 2), jnp.int32)


def call(case: Case, inputs, implementation):
  out, state = delta_rule(
    inputs["q"],
    inputs["k"],
    inputs["v"],
    inputs["beta"],
    log_decay=inputs.get("log_decay"),
    erase_key=inputs.get("erase_key"),
    scale=0.7,
    initial_state=DeltaRuleState(inputs["kv"]),
    segment_ids=segment_ids(case),
    implementation=implementation,
    chunk_size=case.chunk,
  )
  return {"out": out, "state": state}


def check(case: Case, dtype):
  inputs = make_inputs(case)
  low = ("q", "k", "v", "erase_key")
  dtypes = {name: dtype if name in low else jnp.float32 for name in inputs}
  errors = contract.errors_against_reference(
    lambda x, name: call(case, x, name), inputs, dtypes, "chunked"
  )
  limit = contract.tolerance(dtype, case.T)
  too_large = {name: error for name, error in errors.items() if not error <= limit}
  assert not too_large, f"limit {limit:.1e}: {too_large}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunked_float32(case):
  check(case, jnp.float32)


@pytest.mark.parametrize("case", [CASES[3], CASES[9]], ids=str)
def test_chunked_bfloat16(case):
  check(case, jnp.bfloat16)


def test_chunked_float16():
  check(CASES[4], jnp.float16)


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY, ids=str)
def test_every_combination(case):
  check(case, jnp.float32)

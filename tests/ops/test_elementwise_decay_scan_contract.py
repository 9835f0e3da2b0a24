"""elementwise_decay_scan, every implementation: values and gradients against float64."""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.ops.elementwise_decay_scan.api import elementwise_decay_scan
from lnssm_jax.ops.elementwise_decay_scan.state import DecayFunction, ElementwiseDecayState
from tests.ops import contract

B, H = 2, 2


@dataclass(frozen=True)
class Case:
  """One set of arguments. `decay` names the axes of an array, or says "function"."""

  T: int = 37
  decay: str = "BTHKV"
  strength: str = "ordinary"
  segments: bool = False
  K: int = 3
  V: int = 5
  chunk: int | None = 4

  def __str__(self):
    segments = "-segments" if self.segments else ""
    return f"{self.decay}-{self.strength}-T{self.T}K{self.K}V{self.V}C{self.chunk}{segments}"


# Every kind of decay at every strength; lengths on both sides of a chunk's border.
CASES = [
  Case(1, "BTHKV", "extreme", chunk=None),
  Case(2, "function", "weak", segments=True, chunk=None),
  Case(15, "HKV", "extreme", segments=True),
  Case(37, "BTHKV", "extreme", segments=True),
  Case(37, "BTHKV", "weak", segments=True),
  Case(37, "function", "extreme", K=1, V=7),
  Case(63, "HKV", "weak", chunk=None),
  Case(64, "function", "ordinary", segments=True),
  Case(65, "BTHKV", "ordinary", chunk=None),
  Case(1000, "HKV", "same", chunk=None),
]
MANY = [
  Case(T, decay, strength, segments, K, V, chunk)
  for decay, strength, segments, (T, K, V, chunk) in itertools.product(
    ("BTHKV", "HKV", "function"),
    ("weak", "ordinary", "extreme"),
    (False, True),
    [(1, 1, 1, None), (2, 3, 2, 1), (63, 5, 3, 8), (64, 4, 4, 64), (130, 2, 9, None)],
  )
]


def strengthened(rng, shape, strength):
  """Log decays: weak (near 0), ordinary, or extreme: from -20 a step to 0, ends included.

  Or the same 1e-6 everywhere: a decay that is rounded to float32 is then wrong a thousand times.
  """
  if strength == "same":
    return np.full(shape, -1e-6)
  if strength == "weak":
    return -np.exp(rng.normal(size=shape) - 7)
  if strength == "ordinary":
    return -np.exp(rng.normal(size=shape) - 1)
  decay = -20 * rng.random(shape) ** 2
  decay.flat[0], decay.flat[-1] = -20, 0
  return decay


def make_inputs(case: Case, seed: int = 0):
  rng = np.random.default_rng(seed)
  T, K, V = case.T, case.K, case.V
  inputs = {name: rng.normal(size=(B, T, H, K)) for name in ("q", "k")}
  inputs |= {"v": rng.normal(size=(B, T, H, V)), "kv": rng.normal(size=(B, H, K, V))}
  if case.decay == "function":
    inputs["log_decay"] = rng.normal(size=(B, T, H, K))
    inputs["parameters"] = np.abs(strengthened(rng, (H, K, V), case.strength))
  else:
    sizes = {"B": B, "T": T, "H": H, "K": K, "V": V}
    shape = tuple(sizes[axis] for axis in case.decay)
    inputs["log_decay"] = strengthened(rng, shape, case.strength)
  return inputs


def segment_ids(case: Case):
  """Ids that change often, at the last step too, skip numbers and come back to an earlier one."""
  if not case.segments:
    return None
  changes = np.random.default_rng(1).random((B, case.T)) < 0.15
  changes[0, -1] = True
  return jnp.asarray(3 * (np.cumsum(changes, axis=1) % 2), jnp.int32)


def make_decay(steps, parameters):
  """Not the product of a key and a value factor, nor in dtype float32 unless the inputs are."""
  return -parameters * jax.nn.sigmoid(2 * steps[..., None])


def call(case: Case, inputs, implementation):
  log_decay = inputs["log_decay"]
  if case.decay == "function":
    log_decay = DecayFunction(make_decay, log_decay, inputs["parameters"])
  out, state = elementwise_decay_scan(
    inputs["q"],
    inputs["k"],
    inputs["v"],
    log_decay,
    initial_state=ElementwiseDecayState(inputs["kv"]),
    segment_ids=segment_ids(case),
    implementation=implementation,
    chunk_size=case.chunk,
  )
  return {"out": out, "state": state}


def check(case: Case, implementation: str, dtype):
  inputs = make_inputs(case)
  dtypes = {name: dtype if name in ("q", "k", "v") else jnp.float32 for name in inputs}
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


@pytest.mark.parametrize(("case", "dtype"), [(CASES[3], jnp.bfloat16), (CASES[4], jnp.float16)])
def test_chunked_narrow(case, dtype):
  check(case, "chunked", dtype)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["chunked", "associative"])
@pytest.mark.parametrize("case", MANY, ids=str)
def test_every_combination(case, implementation):
  check(case, implementation, jnp.float32)

"""diagonal_scan, every implementation: values and gradients against float64.

A complex array is passed as its real and imaginary parts, so that all gradients are of real
numbers.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.ops.diagonal_scan.api import diagonal_scan
from lnssm_jax.ops.diagonal_scan.state import DiagonalState
from tests.ops import contract

B = 2


@dataclass(frozen=True)
class Case:
  """One set of arguments. `complex_` names the complex ones: "", "a", "x" or "ax"."""

  T: int = 37
  D: int = 5
  strength: str = "ordinary"
  complex_: str = ""
  constant: bool = False
  segments: bool = False
  reverse: bool = False
  chunk: int | None = None

  def __str__(self):
    flags = [name for name in ("constant", "segments", "reverse") if getattr(self, name)]
    return "-".join(
      [
        self.strength,
        f"complex_{self.complex_ or 'none'}",
        *flags,
        f"T{self.T}D{self.D}C{self.chunk}",
      ]
    )


# The lengths lie on both sides of a chunk's border; chunks of 64 are scanned, short ones are
# chains.
CASES = [
  Case(T=1),
  Case(T=2, complex_="ax", reverse=True),
  Case(T=15, strength="extreme", constant=True),
  Case(T=63, strength="weak", segments=True, chunk=9),
  Case(T=64, constant=True, segments=True, reverse=True),
  Case(T=65, complex_="ax", segments=True, strength="extreme", chunk=8),
  Case(T=65, reverse=True, chunk=64, strength="extreme"),
  Case(T=130, complex_="ax", constant=True, chunk=64, segments=True),
  Case(T=48, complex_="a", reverse=True, segments=True),
  Case(T=33, complex_="x", constant=True, strength="weak"),
  Case(T=1000, strength="weak", constant=True),
  Case(T=1000, complex_="ax", segments=True, strength="extreme", chunk=8),
]
MANY = [
  Case(T, D, strength, complex_, constant, segments, reverse, chunk)
  for strength in ("weak", "ordinary", "extreme")
  for complex_ in ("", "a", "x", "ax")
  for constant in (False, True)
  for segments in (False, True)
  for reverse in (False, True)
  for T, D, chunk in [(1, 1, None), (63, 17, 8), (130, 8, 64), (257, 3, None)]
]


def make_inputs(case: Case, seed: int = 0):
  """Decays of a modulus near 1 (weak), ordinary, or from exp(-20) to 1 with 0 among them."""
  rng = np.random.default_rng(seed)
  shape = (case.D,) if case.constant else (B, case.T, case.D)
  if case.strength == "extreme":
    log = -20 * rng.random(shape) ** 2
    log.flat[0], log.flat[-1] = -20, 0
    modulus = np.exp(log)
    modulus[..., case.D // 2] = 0
  else:
    modulus = np.exp(-np.exp(rng.normal(size=shape) - (7 if case.strength == "weak" else 1)))
  inputs = {"x": rng.normal(size=(B, case.T, case.D)), "h": rng.normal(size=(B, case.D))}
  if "a" in case.complex_:
    phase = rng.uniform(-np.pi, np.pi, size=shape)
    # Rounded to float32 the modulus may exceed 1 by a rounding, which 1000 steps must not amplify.
    modulus = modulus * (1 - 1e-6)
    inputs |= {"decay": modulus * np.cos(phase), "decay_i": modulus * np.sin(phase)}
  else:
    inputs["decay"] = modulus * np.where(rng.random(shape) < 0.2, -1, 1)
  if "x" in case.complex_:
    inputs["x_i"] = rng.normal(size=(B, case.T, case.D))
  if case.complex_:
    inputs["h_i"] = rng.normal(size=(B, case.D))
  return inputs


def segment_ids(case: Case):
  """Ids that change often, skip numbers (an empty document) and come back to an earlier one."""
  if not case.segments:
    return None
  rng = np.random.default_rng(1)
  return jnp.asarray(3 * (np.cumsum(rng.random((B, case.T)) < 0.15, axis=1) % 2), jnp.int32)


def call(case: Case, inputs, implementation):
  get = lambda name: (
    jax.lax.complex(inputs[name], inputs[name + "_i"]) if name + "_i" in inputs else inputs[name]
  )
  out, state = diagonal_scan(
    get("decay"),
    get("x"),
    reverse=case.reverse,
    initial_state=DiagonalState(get("h")),
    segment_ids=segment_ids(case),
    implementation=implementation,
    chunk_size=case.chunk,
  )
  if not case.complex_:
    return {"out": out, "state": state}
  return {"out": (out.real, out.imag), "state": (state.h.real, state.h.imag)}


def check(case: Case, implementation: str, dtype):
  inputs = make_inputs(case)
  dtypes = {name: dtype if name in ("x", "x_i") else jnp.float32 for name in inputs}
  errors = contract.errors_against_reference(
    lambda x, name: call(case, x, name), inputs, dtypes, implementation
  )
  limit = contract.tolerance(dtype, case.T)
  too_large = {name: error for name, error in errors.items() if not error <= limit}
  assert not too_large, f"limit {limit:.1e}: {too_large}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunked_float32(case):
  check(case, "chunked", jnp.float32)


@pytest.mark.parametrize("case", [CASES[0], *CASES[3:6], CASES[8], CASES[10]], ids=str)
def test_associative_float32(case):
  check(case, "associative", jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_chunked_low_precision(dtype):
  check(CASES[3], "chunked", dtype)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["chunked", "associative"])
@pytest.mark.parametrize("case", MANY, ids=str)
def test_every_combination(case, implementation):
  check(case, implementation, jnp.float32)

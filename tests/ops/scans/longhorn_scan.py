"""longhorn_scan: its arguments, and what it is held to."""

import itertools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from lnssm_jax import ops
from tests.ops.scans.base import B, Check, Scan


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
  state: bool = True

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
  Case(1000, "lasting", chunk=None),
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
  if case.strength == "lasting":
    return np.full(beta.shape, 0.5), np.full(k.shape, 1e-3)
  if case.strength == "ordinary":
    return beta, k
  k[np.arange(B)[:, None], np.arange(T), rng.integers(N, size=(B, T))] *= 1000
  k[:, ::5] = 0
  return 1 / (1 + np.exp(rng.normal(size=(B, T, D)) * 6)), k


def draw(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
  T, D, N = case.T, case.D, case.N
  beta, k = strengths_and_keys(rng, case)
  inputs = {"x": rng.normal(size=(B, T, D)), "beta": beta, "k": k}
  inputs["q"] = rng.normal(size=(B, T, N))
  if case.state:
    inputs["state.memory"] = rng.normal(size=(B, D, N))
  if case.skip:
    inputs["skip"] = rng.normal(size=D)
  return inputs


def arguments(case: Case, inputs):
  return tuple(inputs[n] for n in ("x", "beta", "k", "q")), {"skip": inputs.get("skip")}


LONGHORN_SCAN = Scan(
  function=ops.longhorn_scan,
  state=ops.LonghornState,
  draw=draw,
  arguments=arguments,
  narrow=("x", "beta", "k", "q"),
  steps=("x", "beta", "k", "q"),
  checks=[
    *(Check(case) for case in CASES),
    *(Check(CASES[n], "associative") for n in (3, 6)),
    Check(CASES[3], dtype=jnp.bfloat16),
    Check(CASES[7], dtype=jnp.float16),
  ],
  sweep=[Check(case, form) for form in ("chunked", "associative") for case in MANY],
  small=Case(23, N=4, state=False),
  measured=lambda T, strength: Case(T, strength, D=8, N=4, chunk=None),
  memory=lambda T: Case(T, D=16, N=16, chunk=8, state=False),
)

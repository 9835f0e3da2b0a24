"""selective_scan: its arguments, and what it is held to."""

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


def steps_and_rates(rng, case: Case):
  """`dt` and `a` with dt a weak (near 0), ordinary (as initialised), or extreme: -40 to 0.

  Or the same small dt everywhere: a decay that is rounded to float32 is then wrong a thousand
  times.
  """
  T, D, N = case.T, case.D, case.N
  a = -np.exp(rng.normal(size=(D, N)))
  if case.strength == "lasting":
    return np.full((B, T, D), 1e-6), a
  if case.strength == "weak":
    return np.exp(rng.uniform(-9, -6, size=(B, T, D))), a
  if case.strength == "ordinary":
    return np.exp(rng.uniform(-6, 0, size=(B, T, D))), a
  dt = rng.random((B, T, D)) ** 2
  dt.flat[0], dt.flat[-1] = 1, 0
  return dt, -40 * rng.random((D, N))


def draw(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
  T, D, N = case.T, case.D, case.N
  dt, a = steps_and_rates(rng, case)
  inputs = {"x": rng.normal(size=(B, T, D)), "dt": dt, "a": a}
  inputs |= {name: rng.normal(size=(B, T, N)) for name in ("b", "c")}
  if case.state:
    inputs["state.ssm"] = rng.normal(size=(B, D, N))
  if case.skip:
    inputs["skip"] = rng.normal(size=D)
  return inputs


def arguments(case: Case, inputs):
  return tuple(inputs[n] for n in ("x", "dt", "a", "b", "c")), {"skip": inputs.get("skip")}


SELECTIVE_SCAN = Scan(
  function=ops.selective_scan,
  state=ops.SelectiveState,
  draw=draw,
  arguments=arguments,
  narrow=("x", "dt", "b", "c"),
  steps=("x", "dt", "b", "c"),
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

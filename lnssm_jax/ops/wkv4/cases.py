"""wkv4: its arguments, and what it is held to.

A state is compared by the logarithm of its sum of weights and its mean: its
maximum is a scale, which may differ by a rounding.
"""

import itertools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import B, Check, Scan, log_decay


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


# The lengths are on both sides of a chunk boundary; chunks of 64 are scanned, short ones are
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
SLOW = (6, 7, 9, 10)
MANY = [
  Case(T, D, strength, keys, segments, state, chunk)
  for strength in ("weak", "ordinary", "extreme")
  for keys in ("ordinary", "wide", "two")
  for segments in (False, True)
  for state in (False, True)
  for T, D, chunk in [(63, 17, 16), (130, 8, 64)]
]
# The kernels, interpreted on the CPU: few and small. D is padded to a multiple of 128, T of
# 32. (Those that always run, in splits of a sequence: tests/kernels/test_wkv4.py.)
KERNEL_SWEEP = [
  Check(
    Case(T=40, D=130, strength="extreme", keys="wide", segments=True, chunk=None),
    "pallas_interpret",
  ),
]
KERNEL_SWEEP += [
  Check(
    Case((1, 32, 40, 65)[n % 4], (5, 130)[n % 5 == 0], *options, chunk=None),
    "pallas_interpret",
    jnp.bfloat16 if n % 3 == 0 else jnp.float32,
  )
  for n, options in enumerate(
    itertools.product(
      ("weak", "extreme"), ("ordinary", "wide", "two"), (False, True), (False, True)
    )
  )
]


def _draw(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Decays near 0, ordinary, or 1e-7 to 20 per token; keys near 0, from -200 to 200, or +-200; or,
  mixed, near 0 in every second channel and from -200 to 200 in the others."""
  T, D = case.T, case.D
  rate = -log_decay(rng, (D,), "ordinary" if case.strength == "extreme" else case.strength)
  if case.strength == "extreme":
    rate[: D // 2 + 1] = np.geomspace(20, 1e-7, D // 2 + 1)
  keys = {
    "ordinary": lambda shape: rng.normal(size=shape),
    "wide": lambda shape: rng.uniform(-200, 200, size=shape),
    "two": lambda shape: 200 * rng.choice([-1, 1], size=shape) + rng.normal(size=shape),
    "mixed": lambda shape: np.where(
      np.arange(D) % 2, rng.uniform(-200, 200, size=shape), rng.normal(size=shape)
    ),
  }[case.keys]
  inputs = {"k": keys((B, T, D)), "v": rng.normal(size=(B, T, D)), "decay_rate": rate}
  inputs["bonus"] = rng.normal(size=D)
  if case.state:
    inputs["state.max"] = keys((B, D))
    inputs["state.denominator"] = np.exp(rng.normal(size=(B, D)))
    inputs["state.numerator"] = inputs["state.denominator"] * rng.normal(size=(B, D))
  return inputs


def _compared(out, state: ops.WKV4State):
  log_weight = state.max + jnp.log(state.denominator)
  return {"out": out, "log_weight": log_weight, "mean": state.numerator / state.denominator}


WKV4 = Scan(
  function=ops.wkv4,
  state=ops.WKV4State,
  draw=_draw,
  arguments=lambda case, x: (tuple(x[n] for n in ("k", "v", "decay_rate", "bonus")), {}),
  number_fields=("strength", "keys"),
  narrow=("k", "v"),
  steps=("k", "v"),
  implementations=("chunked", "reference", "associative"),
  checks=[
    *(Check(case) for n, case in enumerate(CASES) if n not in SLOW),
    Check(CASES[5], "associative"),
    Check(CASES[4], dtype=jnp.bfloat16),
  ],
  sweep=[
    *(Check(CASES[n]) for n in SLOW),
    *(Check(CASES[n], "associative") for n in (3, 8)),
    Check(CASES[4], dtype=jnp.float16),
    *(Check(case, form) for case in MANY for form in ("chunked", "associative")),
    *KERNEL_SWEEP,
    *(check._replace(implementation="pallas_ampere_interpret") for check in KERNEL_SWEEP[::4]),
  ],
  small=Case(T=23, state=False),
  variants=(Case(T=23, keys="wide", state=False),),
  measured=lambda T, strength: Case(T, D=8, strength=strength, chunk=None),
  compared=_compared,
)

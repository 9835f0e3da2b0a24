"""wkv4: its arguments and cases.

A state is compared by the logarithm of its sum of weights and its mean: its
maximum is a scale, which may differ by a rounding.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import B, Scan, log_decay


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
  narrow=("k", "v"),
  measured=lambda T, strength: Case(T, D=8, strength=strength, chunk=None),
  compared=_compared,
)

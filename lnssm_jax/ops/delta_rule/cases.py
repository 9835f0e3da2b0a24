"""delta_rule: its arguments and cases."""

from dataclasses import dataclass

import numpy as np

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import B, Scan, log_decay


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
  H: int = 2
  state: bool = True
  shared: int = 1  # heads of v that share one of q, k and the erase key
  readers: int = 1  # heads of q that share all else
  channels: bool = False  # a decay per key channel
  # "write" with a write key, "before" also erasing before the decay, "early" that alone
  keys: str = ""

  @property
  def strength(self) -> str:
    """Of the decay."""
    return self.decay or "none"

  def __str__(self):
    flags = [name for name in ("channels", "erase", "segments") if getattr(self, name)]
    flags += [self.keys] if self.keys else []
    sizes = f"T{self.T}K{self.K}V{self.V}C{self.chunk}"
    flags += [f"{n}{x}" for n in ("shared", "readers") if (x := getattr(self, n)) > 1]
    return "-".join([self.rates, self.strength, *flags, sizes])


def _unit(x: np.ndarray) -> np.ndarray:
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _draw(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
  T, K, V = case.T, case.K, case.V
  H = case.H // case.readers
  keys = B, T, H // case.shared, K
  inputs = {"q": rng.normal(size=(B, T, case.H // case.shared, K))}
  inputs["k"] = _unit(rng.normal(size=keys))
  inputs["v"] = rng.normal(size=(B, T, H, V))
  if case.state:
    inputs["state.kv"] = rng.normal(size=(B, H, K, V))
  inputs["beta"] = rng.random((B, T, H) if case.rates == "head" else (B, T, H, V))
  if case.erase:
    # Near the key, and short enough not to make the state grow.
    inputs["erase_key"] = _unit(inputs["k"] + 0.2 * rng.normal(size=keys))
  if case.decay:
    inputs["log_decay"] = log_decay(rng, (B, T, H, K) if case.channels else (B, T, H), case.decay)
  if case.keys in ("write", "before"):
    inputs["write_key"] = rng.normal(size=keys)
  return inputs


def _arguments(case: Case, inputs):
  options = {n: inputs.get(n) for n in ("log_decay", "erase_key", "write_key")}
  options |= {"scale": 0.7, "erase_before_decay": case.keys in ("before", "early")}
  return tuple(inputs[n] for n in ("q", "k", "v", "beta")), options


DELTA_RULE = Scan(
  function=ops.delta_rule,
  state=ops.DeltaRuleState,
  draw=_draw,
  arguments=_arguments,
  narrow=("q", "k", "v", "erase_key", "write_key"),
  measured=lambda T, strength: Case(T, H=1, K=8, V=8, decay=strength, chunk=None),
)

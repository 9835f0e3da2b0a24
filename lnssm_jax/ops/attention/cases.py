"""attention: its arguments and cases.

The strength of a case is that of its scores. The state counts steps in `position`, an integer: it
is an input as a float, whose gradient is 0.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import B, Scan

SHARPNESS = {"weak": 0.1, "ordinary": 1.0, "extreme": 3.0}


@dataclass(frozen=True)
class Case:
  """One set of arguments. `cached`: steps before the first, for each row, or None."""

  T: int = 37
  K: int = 5
  V: int = 7
  heads: tuple[int, int] = (2, 2)
  window: int | None = None
  block: int | None = None
  causal: bool = True
  cached: tuple[int, int] | None = None
  segments: bool = False
  strength: str = "ordinary"
  chunk: int | None = 16
  sinks: bool = False
  dropout: float = 0.0

  def __str__(self):
    flags = ["segments"] * self.segments + ["acausal"] * (not self.causal)
    flags += [f"{name}{getattr(self, name)}" for name in ("window", "block") if getattr(self, name)]
    flags += ["cached"] * (self.cached is not None) + ["sinks"] * self.sinks
    flags += ["dropout"] * (self.dropout > 0)
    sizes = f"T{self.T}K{self.K}V{self.V}H{self.heads[0]}G{self.heads[1]}C{self.chunk}"
    return "-".join([self.strength, *flags, sizes])

  @property
  def room(self) -> int:
    """The size of the cache: a full one may have empty slots."""
    fixed = self.window or self.block
    return fixed - 1 if fixed else max(self.cached or (0,))


def _draw(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
  T, K, V, (H, G) = case.T, case.K, case.V, case.heads
  inputs = {"q": SHARPNESS[case.strength] * rng.normal(size=(B, T, H, K))}
  inputs |= {"k": rng.normal(size=(B, T, G, K)), "v": rng.normal(size=(B, T, G, V))}
  if case.cached is not None:
    inputs["state.k"] = rng.normal(size=(B, case.room, G, K))
    inputs["state.v"] = rng.normal(size=(B, case.room, G, V))
    inputs["state.position"] = np.asarray(case.cached, np.float64)
  if case.sinks:
    inputs["sinks"] = rng.normal(size=H)
  return inputs


def _state(k, v, position) -> ops.AttentionState:
  return ops.AttentionState(k, v, jnp.round(position).astype(jnp.int32))


def _arguments(case: Case, inputs):
  options = {"window": case.window, "block": case.block, "causal": case.causal}
  options |= {"sinks": inputs.get("sinks"), "dropout": case.dropout}
  if case.dropout:
    options["dropout_key"] = jax.random.key(7)
  return tuple(inputs[n] for n in "qkv"), options


def _compared(out, state: ops.AttentionState | None):
  """A growing cache may end with any number of empty slots: a small one is filled up with them."""
  if state is not None:
    missing = max(0, 32 - state.k.shape[1])
    fill = lambda x: jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)))
    state = state._replace(k=fill(state.k), v=fill(state.v))
  return {"out": out, "state": state}


ATTENTION = Scan(
  function=ops.attention,
  state=_state,
  draw=_draw,
  arguments=_arguments,
  narrow=("q", "k", "v", "state.k", "state.v"),
  measured=lambda T, strength: Case(
    T, K=8, V=8, heads=(1, 1), window=64, cached=(100, 100), strength=strength, chunk=None
  ),
  strengths=("weak", "ordinary", "extreme"),
  longest_reference={"": 4096},
  compared=_compared,
)

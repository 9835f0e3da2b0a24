"""elementwise_decay_scan: its arguments and cases."""

from dataclasses import dataclass

import jax
import numpy as np

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import B, Scan, log_decay


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
  H: int = 2
  state: bool = True
  weight: bool = False

  def __str__(self):
    segments = "-segments" if self.segments else ""
    weight = "-weight" if self.weight else ""
    return (
      f"{self.decay}-{self.strength}-T{self.T}K{self.K}V{self.V}C{self.chunk}{weight}{segments}"
    )


def _draw(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
  T, H, K, V = case.T, case.H, case.K, case.V
  inputs = {name: rng.normal(size=(B, T, H, K)) for name in ("q", "k")}
  inputs["v"] = rng.normal(size=(B, T, H, V))
  if case.state:
    inputs["state.kv"] = rng.normal(size=(B, H, K, V))
  if case.decay == "function":
    inputs["log_decay"] = rng.normal(size=(B, T, H, K))
    inputs["parameters"] = np.abs(log_decay(rng, (H, K, V), case.strength))
  else:
    sizes = {"B": B, "T": T, "H": H, "K": K, "V": V}
    shape = tuple(sizes[axis] for axis in case.decay)
    inputs["log_decay"] = log_decay(rng, shape, case.strength)
  if case.weight:
    inputs["read_weight"] = rng.normal(size=(H, K, V))
  return inputs


def _make_decay(steps, parameters):
  """Not the product of a key and a value factor, nor in dtype float32 unless the inputs are."""
  return -parameters * jax.nn.sigmoid(2 * steps[..., None])


def _arguments(case: Case, inputs):
  decay = inputs["log_decay"]
  if case.decay == "function":
    decay = ops.DecayFunction(_make_decay, decay, inputs["parameters"])
  return (inputs["q"], inputs["k"], inputs["v"], decay), {"read_weight": inputs.get("read_weight")}


ELEMENTWISE_DECAY_SCAN = Scan(
  function=ops.elementwise_decay_scan,
  state=ops.ElementwiseDecayState,
  draw=_draw,
  arguments=_arguments,
  narrow=("q", "k", "v"),
  measured=lambda T, strength: Case(T, "BTHKV", strength, K=4, V=4, chunk=None, H=1),
)

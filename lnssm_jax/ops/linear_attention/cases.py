"""linear_attention: its arguments and cases."""

from dataclasses import dataclass

import numpy as np

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import B, Scan, log_decay


@dataclass(frozen=True)
class Case:
  """One set of arguments. `decay` and `value_decay` name their axes: "HK", "BTH", ..."""

  T: int = 37
  K: int = 5
  V: int = 7
  decay: str | None = "HK"
  strength: str = "ordinary"
  value_decay: str | None = None
  bonus: bool = False
  normalize: bool = False
  segments: bool = False
  chunk: int | None = 8
  H: int = 3
  state: bool = True
  shared: int = 1  # heads of v that share one of q and k
  readers: int = 1  # heads of q that share one of k and v
  own_decays: bool = False  # heads of q that share k and v have decays, and so states, of their own
  own_weight: bool = False
  ranks: int = 1  # queries, keys and values per token

  def __str__(self):
    flags = [name for name in ("bonus", "normalize", "segments") if getattr(self, name)]
    value = f"value_{self.value_decay}" if self.value_decay else None
    sizes = f"T{self.T}K{self.K}V{self.V}C{self.chunk}"
    flags += [f"shared{self.shared}"] if self.shared > 1 else []
    flags += [f"readers{self.readers}"] if self.readers > 1 else []
    flags += [name for name in ("own_decays", "own_weight") if getattr(self, name)]
    flags += [f"ranks{self.ranks}"] if self.ranks > 1 else []
    return "-".join(x for x in (self.decay or "none", self.strength, value, *flags, sizes) if x)


def _draw(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Positive features where they are normalized, as every normalized system has them."""
  T, H, K, V = case.T, case.H, case.K, case.V
  G = H // case.readers
  S = H if case.own_decays else G
  sizes = {"B": B, "T": T, "H": S, "K": K, "V": V}
  decays = lambda axes: log_decay(rng, tuple(sizes[axis] for axis in axes), case.strength)
  normal = lambda *shape: rng.normal(size=shape)
  feature = (lambda *shape: np.exp(normal(*shape))) if case.normalize else normal
  tokens = (B, T) if case.ranks == 1 else (B, T, case.ranks)
  inputs = {
    "q": feature(*tokens, H // case.shared, K),
    "k": feature(*tokens, G // case.shared, K),
    "v": normal(*tokens, G, V),
  }
  if case.state:
    inputs["state.kv"] = normal(B, S, K, V)
    if case.normalize:
      inputs["state.key_sum"] = feature(B, S, K)
  if case.decay:
    inputs["log_decay"] = decays(case.decay)
  if case.value_decay:
    inputs["value_log_decay"] = decays(case.value_decay)
  if case.bonus:
    inputs["bonus"] = feature(H, K)
  if case.own_weight:
    inputs["own_weight"] = rng.uniform(0, 3, size=(B, T, H))
    # A denominator is nothing but the own token at a document's start.
    inputs["own_weight"][:, ::5] = 0.5 if case.normalize else 0.0
  return inputs


def _arguments(case: Case, inputs):
  options = {n: inputs.get(n) for n in ("log_decay", "value_log_decay", "bonus", "own_weight")}
  return tuple(inputs[n] for n in "qkv"), options | {"normalize": case.normalize, "scale": 0.7}


LINEAR_ATTENTION = Scan(
  function=ops.linear_attention,
  state=ops.LinearAttentionState,
  draw=_draw,
  arguments=_arguments,
  narrow=("q", "k", "v"),
  measured=lambda T, strength: Case(
    T, H=1, K=8, V=8, strength=strength, normalize=True, chunk=None
  ),
  measured_too={
    "decay per step": lambda T, strength: Case(
      T, H=1, K=8, V=8, decay="BTHK", strength=strength, chunk=None
    )
  },
)

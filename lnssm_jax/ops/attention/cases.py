"""attention: its arguments and checks.

The strength of a case is that of its scores. The state counts steps in `position`, an integer: it
is an input as a float, whose gradient is 0.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import B, Check, Scan

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


# Rows of a batch have caches that are full, wrapped around, partly filled and empty.
CASES = [
  Case(T=65, heads=(4, 2)),
  Case(T=64, segments=True, strength="extreme"),
  Case(T=63, cached=(20, 3), segments=True),
  Case(T=1000, K=4, V=3, window=130, strength="weak", chunk=None),
  Case(window=7, cached=(9, 3), segments=True, heads=(4, 2), sinks=True, chunk=8),
  Case(window=30, cached=(100, 0), chunk=8),
  Case(block=10, cached=(25, 3), segments=True, chunk=8),
  Case(T=65, causal=False, segments=True, heads=(4, 2)),
  Case(T=65, causal=False, window=9, chunk=8),
  Case(T=15, causal=False, block=4, chunk=4),
  Case(T=2, window=1, cached=(4, 0)),
  Case(T=1, window=9, cached=(30, 3), heads=(4, 2), chunk=None),
]
SLOW = (3, 5)
MANY = [
  Case(T, K, V, heads, window, block, causal, cached, segments, strength, chunk)
  for T, K, V, chunk in [(3, 3, 1, None), (65, 17, 5, 32), (130, 8, 8, None)]
  for heads in [(2, 2), (6, 2)]
  for window, block in [(None, None), (20, None), (100, None), (None, 20), (None, 100)]
  for causal, cached in [(True, None), (True, (120, 5)), (False, None)]
  for segments in (False, True)
  for strength in ("weak", "extreme")
]

# For the kernels: more than one tile of queries and of keys, ends inside a tile, heads that share
# keys, documents and windows that leave whole tiles out.
KERNEL_CASES = [
  Case(T=200, K=64, V=64, heads=(2, 1), segments=True, strength="extreme"),
  Case(T=130, K=72, V=40, heads=(4, 2), causal=False, segments=True),
  Case(T=3, K=32, V=32, heads=(2, 2)),
  # Rows whose cache is full and wrapped around, and partly filled; then one token.
  Case(T=90, K=32, V=32, heads=(2, 1), window=60, cached=(130, 37), segments=True),
  Case(T=1, K=32, V=64, heads=(4, 2), window=81, cached=(200, 50), sinks=True),
]
AMPERE_CASE = Case(T=90, K=72, V=24, heads=(2, 1), window=40, segments=True, sinks=True)
MORE_KERNEL_CASES = [
  Case(T=300, K=40, V=72, heads=(2, 2), window=70, segments=True, sinks=True),
  Case(T=130, K=192, V=128, heads=(2, 2), segments=True),
  Case(T=20, K=32, V=32, heads=(2, 2), cached=(140, 0)),
  Case(T=90, K=32, V=32, heads=(2, 1), window=60, cached=(130, 37), segments=True, dropout=0.3),
  Case(T=150, K=32, V=32, heads=(2, 2), block=90, cached=(140, 70), segments=True),
  Case(T=1, K=64, V=32, heads=(2, 2), cached=(90, 0), strength="extreme"),
  Case(T=1, K=32, V=32, heads=(2, 2), block=50, cached=(70, 0)),
]


def _kernel(case: Case, implementation: str = "pallas_interpret") -> Check:
  return Check(replace(case, chunk=None), implementation, jnp.bfloat16)


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


SMALL = {"T": 23, "K": 3, "V": 4, "heads": (2, 1), "chunk": 8}

ATTENTION = Scan(
  function=ops.attention,
  state=_state,
  draw=_draw,
  arguments=_arguments,
  narrow=("q", "k", "v", "state.k", "state.v"),
  steps=("q", "k", "v"),
  implementations=("chunked", "reference"),
  checks=[
    *(Check(case) for n, case in enumerate(CASES) if n not in SLOW),
    Check(CASES[4], dtype=jnp.bfloat16),
    *(_kernel(case) for case in KERNEL_CASES),
    _kernel(AMPERE_CASE, "pallas_ampere_interpret"),
  ],
  sweep=[
    *(Check(CASES[n]) for n in SLOW),
    Check(CASES[7], dtype=jnp.bfloat16),
    *(Check(case) for case in MANY),
    Check(CASES[9], dtype=jnp.float16),
    *(_kernel(case) for case in MORE_KERNEL_CASES),
    *(
      _kernel(case, "pallas_ampere_interpret")
      for case in KERNEL_CASES + MORE_KERNEL_CASES
      if case.T > 1 and case.K <= 128 and not case.dropout
    ),
  ],
  small=Case(**SMALL, window=5),
  variants=(Case(**SMALL, block=6), Case(**SMALL)),
  measured=lambda T, strength: Case(
    T, K=8, V=8, heads=(1, 1), window=64, cached=(100, 100), strength=strength, chunk=None
  ),
  strengths=("weak", "ordinary", "extreme"),
  longest_reference={"": 4096},
  compared=_compared,
  isolates_documents=False,
)

"""attention, the chunked form: values and gradients against float64."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.ops.attention.api import attention
from lnssm_jax.ops.attention.state import AttentionState
from tests.ops import contract

B = 2


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
  sharpness: float = 1.0
  chunk: int | None = 16

  def __str__(self):
    flags = ["segments"] * self.segments + ["acausal"] * (not self.causal)
    flags += [f"{name}{getattr(self, name)}" for name in ("window", "block") if getattr(self, name)]
    flags += ["cached"] * (self.cached is not None)
    sizes = f"T{self.T}K{self.K}V{self.V}H{self.heads[0]}G{self.heads[1]}C{self.chunk}"
    return "-".join([*flags, sizes])

  @property
  def room(self):
    """The size of the cache: a full one may have empty slots."""
    fixed = self.window or self.block
    return fixed - 1 if fixed else max(self.cached)


# Rows of a batch have caches that are full, wrapped around, partly filled and empty.
CASES = [
  Case(T=65, heads=(4, 2)),
  Case(T=64, segments=True, sharpness=3.0),
  Case(T=63, cached=(20, 3), segments=True),
  Case(T=1000, K=4, V=3, window=130, sharpness=0.1, chunk=None),
  Case(window=7, cached=(9, 3), segments=True, heads=(4, 1), chunk=8),
  Case(window=30, cached=(100, 0), chunk=8),
  Case(block=10, cached=(25, 3), segments=True, chunk=8),
  Case(T=65, causal=False, segments=True, heads=(4, 2)),
  Case(T=65, causal=False, window=9, chunk=8),
  Case(T=15, causal=False, block=4, chunk=4),
  Case(T=2, window=1, cached=(4, 0)),
  Case(T=1, window=9, cached=(30, 3), heads=(4, 2), chunk=None),
]
MANY = [
  Case(T, K, V, heads, window, block, causal, cached, segments, sharpness, chunk)
  for T, K, V, chunk in [(3, 3, 1, None), (65, 17, 5, 32), (130, 8, 8, None)]
  for heads in [(2, 2), (6, 2)]
  for window, block in [(None, None), (20, None), (100, None), (None, 20), (None, 100)]
  for causal, cached in [(True, None), (True, (120, 5)), (False, None)]
  for segments in (False, True)
  for sharpness in (0.1, 3.0)
]


def make_inputs(case: Case, seed: int = 0):
  rng = np.random.default_rng(seed)
  T, K, V, (H, G) = case.T, case.K, case.V, case.heads
  inputs = {"q": case.sharpness * rng.normal(size=(B, T, H, K)), "k": rng.normal(size=(B, T, G, K))}
  inputs["v"] = rng.normal(size=(B, T, G, V))
  if case.cached is not None:
    inputs["cached_k"] = rng.normal(size=(B, case.room, G, K))
    inputs["cached_v"] = rng.normal(size=(B, case.room, G, V))
  return inputs


def segment_ids(case: Case):
  """Ids that change often, skip numbers (an empty document) and come back to an earlier one."""
  if not case.segments:
    return None
  rng = np.random.default_rng(1)
  return jnp.asarray(3 * (np.cumsum(rng.random((B, case.T)) < 0.1, axis=1) % 2), jnp.int32)


def call(case: Case, inputs, implementation):
  state = None
  if case.cached is not None:
    position = jnp.asarray(case.cached, jnp.int32)
    state = AttentionState(inputs["cached_k"], inputs["cached_v"], position)
  out, state = attention(
    inputs["q"],
    inputs["k"],
    inputs["v"],
    window=case.window,
    block=case.block,
    causal=case.causal,
    initial_state=state,
    segment_ids=segment_ids(case),
    implementation=implementation,
    chunk_size=case.chunk,
  )
  return {"out": out, "state": state}


def check(case: Case, dtype):
  inputs = make_inputs(case)
  errors = contract.errors_against_reference(
    lambda x, name: call(case, x, name), inputs, dict.fromkeys(inputs, dtype), "chunked"
  )
  limit = contract.tolerance(dtype, case.T)
  too_large = {name: error for name, error in errors.items() if not error <= limit}
  assert not too_large, f"limit {limit:.1e}: {too_large}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunked_float32(case):
  check(case, jnp.float32)


@pytest.mark.parametrize("case", [CASES[4], CASES[7]], ids=str)
def test_chunked_bfloat16(case):
  check(case, jnp.bfloat16)


def test_chunked_float16():
  check(CASES[9], jnp.float16)


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY, ids=str)
def test_every_combination(case):
  check(case, jnp.float32)

"""attention: its cases, and what it is held to."""

from dataclasses import replace

import jax.numpy as jnp

from lnssm_jax.ops.attention import cases
from lnssm_jax.ops.attention.cases import Case
from tests.ops.checked import Check, Checked

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


SMALL = {"T": 23, "K": 3, "V": 4, "heads": (2, 1), "chunk": 8}


ATTENTION = Checked.of(
  cases.ATTENTION,
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
  isolates_documents=False,
)

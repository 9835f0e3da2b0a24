"""elementwise_decay_scan: its cases, and what it is held to."""

import itertools

import jax.numpy as jnp

from lnssm_jax.ops.elementwise_decay_scan import cases
from lnssm_jax.ops.elementwise_decay_scan.cases import Case
from tests.ops.checked import Check, Checked

# Every kind of decay at every strength; lengths on both sides of a chunk boundary.
CASES = [
  Case(1, "BTHKV", "extreme", chunk=None),
  Case(2, "function", "weak", segments=True, chunk=None),
  Case(15, "HKV", "extreme", segments=True, weight=True),
  Case(37, "BTHKV", "extreme", segments=True),
  Case(37, "BTHKV", "weak", segments=True),
  Case(37, "function", "extreme", K=1, V=7),
  Case(63, "HKV", "weak", chunk=None),
  Case(64, "function", "ordinary", segments=True, weight=True),
  Case(65, "BTHKV", "ordinary", chunk=None),
  Case(1000, "HKV", "lasting", chunk=None),
]
MANY = [
  Case(T, decay, strength, segments, K, V, chunk)
  for decay, strength, segments, (T, K, V, chunk) in itertools.product(
    ("BTHKV", "HKV", "function"),
    ("weak", "ordinary", "extreme"),
    (False, True),
    [(1, 1, 1, None), (2, 3, 2, 1), (63, 5, 3, 8), (64, 4, 4, 64), (130, 2, 9, None)],
  )
]


ELEMENTWISE_DECAY_SCAN = Checked.of(
  cases.ELEMENTWISE_DECAY_SCAN,
  steps=("q", "k", "v", "log_decay"),
  checks=[
    *(Check(case) for case in CASES[:-1]),
    Check(CASES[3], "associative"),
    Check(CASES[3], dtype=jnp.bfloat16),
  ],
  sweep=[
    Check(CASES[-1]),
    Check(CASES[6], "associative"),
    Check(CASES[4], dtype=jnp.float16),
    *(Check(case, form) for form in ("chunked", "associative") for case in MANY),
  ],
  small=Case(23, "function", V=4, state=False),
  memory=lambda T: Case(T, "function", K=8, V=8, chunk=8, H=1, state=False),
)

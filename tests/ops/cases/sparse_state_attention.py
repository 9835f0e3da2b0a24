"""sparse_state_attention: its cases, and what it is held to."""

import dataclasses

import jax.numpy as jnp

from lnssm_jax.ops.sparse_state_attention import cases
from lnssm_jax.ops.sparse_state_attention.cases import Case
from tests.ops.checked import Check, Checked

# The lengths are on both sides of a chunk boundary. Each is run by each method.
CASES = [
  Case(T=1, read=True),
  Case(T=2, decay="BTH", N=4),
  Case(T=15, S=3, N=3, decay="HK", strength="extreme", segments=True),
  Case(T=63, strength="extreme", segments=True, read=True),
  Case(T=64, S=1, N=1, decay="H", strength="weak", K=1, V=1),
  Case(T=65, key="BTSHK", decay="BTSHK", strength="extreme", segments=True, read=True),
  Case(T=65, key="BTSHK", value="BTSHV", decay="BTSH", S=1, N=9),
  Case(value="BTSHV", decay=None, segments=True, N=40),
  Case(T=1000, decay="BTH", strength="extreme", chunk=None),
  Case(T=33, decay="BTH", rate=True, segments=True, read=True),
  Case(T=33, key="BTSHK", decay="BTSH", rate=True, segments=True, state=False),
]
# "mask" is little more than linear attention: these always, the others in the sweep.
MASKED = (5,)
SLOW = (1, 2, 4, 6, 8, 10)  # of "varlen"
METHODS = ("mask", "varlen")
MANY = [
  Case(T=65, N=4, method=method, decay=decay, strength=strength, segments=segments, key=key,
       value="BTSHV" if segments else "BTHV", read=True)
  for method in METHODS
  for strength in ("weak", "ordinary", "extreme")
  for segments in (False, True)
  for key, decay in [
    ("BTHK", None),
    ("BTHK", "H"),
    ("BTHK", "HK"),
    ("BTHK", "BTHK"),
    ("BTSHK", "BTH"),
    ("BTSHK", "BTSH"),
    ("BTSHK", "BTSHK"),
  ]
]  # fmt: skip


def _by(method: str, n: int) -> Case:
  return dataclasses.replace(CASES[n], method=method)


SPARSE_STATE_ATTENTION = Checked.of(
  cases.SPARSE_STATE_ATTENTION,
  steps=("q", "k", "v", "indices", "gates", "read_gates", "log_decay", "beta"),
  implementations=("chunked", "reference", "associative"),
  checks=[
    *(Check(_by("varlen", n)) for n in range(len(CASES)) if n not in SLOW),
    *(Check(_by("mask", n)) for n in MASKED),
    Check(_by("varlen", 3), "associative"),
    Check(_by("varlen", 5), dtype=jnp.bfloat16),
    Check(_by("gather", 0), "reference", jnp.bfloat16),
  ],
  sweep=[
    Check(_by("gather", 5), "reference"),
    *(Check(_by("varlen", n)) for n in SLOW),
    Check(_by("mask", 5), dtype=jnp.bfloat16),
    Check(_by("varlen", 3), dtype=jnp.float16),
    *(Check(case) for case in MANY),
    *(Check(_by("mask", n)) for n in range(len(CASES)) if n not in MASKED),
    Check(_by("mask", 3), "associative"),
  ],
  small=Case(T=23, N=3, H=1, V=4, method="varlen", chunk=4, state=False),
  variants=(Case(T=23, N=3, H=1, V=4, method="mask", state=False),),
  isolates_documents=False,
)

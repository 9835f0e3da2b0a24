"""delta_rule: its cases, and what it is held to."""

import dataclasses
import itertools

import jax.numpy as jnp

from lnssm_jax.ops.delta_rule import cases
from lnssm_jax.ops.delta_rule.cases import Case
from tests.ops.checked import Check, Checked

CASES = [
  Case(T=65, chunk=None),
  Case(T=1000, K=8, V=3, decay="weak", segments=True, chunk=None),
  Case(T=64, decay="extreme", erase=True, chunk=None),
  Case(T=63, decay="ordinary", segments=True, erase=True),
  Case(T=15, decay="extreme", segments=True, chunk=4),
  Case(T=2, K=1, V=1, decay="ordinary"),
  Case(T=1, decay="ordinary", erase=True),
  Case(rates="column", decay="extreme", segments=True, erase=True),
  Case(rates="column", T=64, K=8, V=3, decay="weak", chunk=None),
  Case(rates="column", T=15, segments=True, chunk=4),
  Case(rates="column", T=1, decay="ordinary"),
  Case(T=9, decay="ordinary", segments=True, chunk=4, H=4, readers=2),
  Case(T=9, decay="ordinary", erase=True, chunk=4, H=4, shared=2),
  # A decay per key channel, and keys that write.
  Case(decay="extreme", channels=True, segments=True),
  Case(T=15, decay="ordinary", channels=True, segments=True, erase=True, keys="before", chunk=4),
  Case(T=15, decay="weak", channels=True, rates="column", keys="write", chunk=4),
  Case(T=1, decay="ordinary", channels=True, erase=True, keys="before"),
  Case(T=9, decay="ordinary", channels=True, keys="before", chunk=4, H=4, shared=2),
  Case(T=9, decay="ordinary", channels=True, keys="write", chunk=4, H=4, readers=2),
]
ALWAYS = (0, 3, 4, 6, 7, 9, 11, 12, 13, 14, 15)  # the others are slow
MANY = [
  Case(T, K, V, decay, rates, erase, segments, chunk)
  for decay in (None, "weak", "ordinary", "extreme")
  for rates in ("head", "column")
  for erase in (False, True)
  for segments in (False, True)
  for T, K, V, chunk in [(3, 3, 1, None), (65, 17, 5, 32), (130, 8, 8, None), (1000, 16, 4, None)]
]
MANY += [
  Case(T, K, V, decay, rates, erase, segments, chunk, channels=channels, keys=keys)
  for decay in ("weak", "ordinary", "extreme", "lasting", "uneven")
  for channels, rates, erase, segments, keys in (
    (True, "head", False, False, ""),
    (True, "head", True, True, "before"),
    (True, "column", True, True, "write"),
    (False, "head", True, True, "before"),
  )
  for T, K, V, chunk in [(65, 17, 5, 32), (1000, 80 if decay == "uneven" else 16, 4, None)]
  if channels or decay != "uneven"
]
# The kernels, interpreted on the CPU: every CTA costs time, so they are few and small.
# K is padded to a multiple of 64, V to 64 or 128, T to a multiple of 64.
KERNELS = [
  # More columns of values than one head of the kernels has.
  Case(T=15, K=16, V=136, decay="weak", H=2),
  # Decays that last through whole chunks, and two groups of channels.
  Case(T=150, K=72, V=20, decay="weak", erase=True, segments=True, H=1),
  # Key channels that are read in two turns.
  Case(T=15, K=136, V=20, decay="weak", erase=True, H=2, shared=2),
  Case(T=15, K=16, V=20, decay="weak", H=2, readers=2),
  # A decay per key channel, and three keys.
  Case(
    T=66, K=16, V=20, decay="weak", erase=True, channels=True, segments=True, keys="before", H=1
  ),
  # Two blocks of key channels: different decays; subchunks that are merged; a state that passes.
  *(
    Case(T=9, K=72, V=20, decay=decay, channels=True, H=1)
    for decay in ("uneven", "ordinary", "weak")
  ),
]
KERNEL_SWEEP = [
  Case(T=130, K=256, V=136, decay="weak", H=1),
  Case(T=66, K=200, V=24, decay="weak", channels=True, erase=True, segments=True, H=1),
  Case(T=130, K=192, V=24, decay="ordinary", erase=True, segments=True, H=1),
  Case(T=66, K=16, V=20, decay="weak", channels=True, segments=True, keys="early", H=1),
  Case(T=130, K=16, V=24, decay="extreme", channels=True, erase=True, keys="before", H=1),
  Case(T=130, K=64, V=80, decay="lasting", channels=True, segments=True, keys="write", H=1),
  Case(T=66, K=40, V=24, decay="uneven", channels=True, erase=True, keys="before", H=1),
  Case(T=66, K=16, V=136, decay="weak", erase=True, segments=True, keys="write", H=1),
  Case(T=15, K=16, V=20, keys="write", H=2, shared=2),
  Case(T=15, K=16, V=20, decay="weak", channels=True, erase=True, keys="before", H=2, readers=2),
  Case(T=15, K=16, V=20, decay="weak", channels=True, H=2, shared=2),
  Case(T=15, K=16, V=20, decay="weak", channels=True, erase=True, H=2, readers=2),
  Case(T=130, K=72, V=80, decay="weak", channels=True, erase=True, segments=True, H=1),
  Case(T=66, K=80, V=24, decay="uneven", channels=True, H=1),
  Case(T=130, K=16, V=24, decay="lasting", channels=True, H=1),
  Case(T=66, K=16, V=24, decay="extreme", channels=True, segments=True, H=1),
  Case(T=66, K=16, V=24, decay="extreme", channels=True, erase=True, keys="early", H=1),
  Case(T=15, K=16, V=136, decay="ordinary", erase=True, keys="early", H=1),
  Case(T=15, K=16, V=136, decay="weak", H=4, shared=2),
  Case(T=15, K=16, V=136, decay="weak", erase=True, H=4, readers=2),
  Case(T=1, K=16, V=16, decay="weak", erase=True, H=4, readers=2),
  Case(T=66, K=16, V=20, decay="extreme", erase=True, segments=True, H=1),
]
KERNEL_SWEEP += [
  Case(T, K, V, decay, erase=erase, segments=segments, H=1)
  for n, (decay, erase, segments) in enumerate(
    itertools.product((None, "weak", "ordinary", "extreme"), (False, True), (False, True))
  )
  for T, K, V in [[(130, 16, 24), (15, 128, 128), (65, 40, 72), (64, 16, 130), (2, 8, 8)][n % 5]]
]


def _on_kernels(case: Case, implementation: str = "pallas_interpret") -> Check:
  return Check(dataclasses.replace(case, chunk=None), implementation, jnp.bfloat16)


DELTA_RULE = Checked.of(
  cases.DELTA_RULE,
  number_fields=("decay",),
  steps=("q", "k", "v", "beta", "log_decay", "erase_key", "write_key"),
  implementations=("chunked", "reference", "associative"),
  checks=[
    *(Check(CASES[n]) for n in ALWAYS),
    Check(CASES[7], "associative"),
    Check(CASES[14], "associative"),
    Check(CASES[3], dtype=jnp.bfloat16),
    Check(CASES[14], dtype=jnp.bfloat16),
    *(_on_kernels(case) for case in KERNELS),
  ],
  sweep=[
    *(Check(case) for n, case in enumerate(CASES) if n not in ALWAYS),
    Check(CASES[4], "associative"),
    Check(CASES[9], dtype=jnp.bfloat16),
    Check(CASES[4], dtype=jnp.float16),
    *(Check(case) for case in MANY),
    *(Check(case, "associative") for case in MANY if case.T < 1000),
    *(_on_kernels(case) for case in KERNEL_SWEEP),
    *(
      _on_kernels(case, "pallas_ampere_interpret")
      for case in KERNELS + KERNEL_SWEEP[:9] + KERNEL_SWEEP[9::2]
    ),
  ],
  small=Case(T=23, K=3, V=4, decay="ordinary", channels=True, erase=True, chunk=8, state=False),
  variants=(
    Case(T=23, K=3, V=4, decay="ordinary", rates="column", erase=True, chunk=8, state=False),
    Case(T=23, K=3, V=4, decay="ordinary", channels=True, keys="before", chunk=8, state=False),
  ),
  memory=lambda T: Case(T, H=1, K=32, V=32, decay="ordinary", erase=True, state=False),
  isolates_documents=False,
)

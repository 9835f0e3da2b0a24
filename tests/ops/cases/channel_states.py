"""The scans that keep N states per channel: their cases, and what they are held to."""

import itertools

import jax.numpy as jnp

from lnssm_jax.ops.core.channel_cases import Case
from lnssm_jax.ops.longhorn_scan import cases as longhorn
from lnssm_jax.ops.selective_scan import cases as selective
from tests.ops.checked import Check, Checked

# Lengths on both sides of a chunk boundary, every strength with and without segments.
CASES = [
  Case(1, "extreme", chunk=None),
  Case(2, "weak", segments=True, chunk=None),
  Case(15, "ordinary", segments=True, skip=False),
  Case(37, "extreme", segments=True),
  Case(37, "weak", segments=True, skip=False),
  Case(37, "extreme", D=1, N=7),
  Case(63, "weak", chunk=None),
  Case(64, "ordinary", N=1),
  Case(65, "extreme", segments=True, chunk=None),
  Case(1000, "lasting", chunk=None),
  Case(37, "weak", segments=True, activated=True),
  Case(23, "extreme", activated=True),
]
SLOW = (1, 5, 6)
MANY = [
  Case(T, strength, segments, skip, D, N, chunk)
  for strength, segments, skip, (T, D, N, chunk) in itertools.product(
    ("weak", "ordinary", "extreme"),
    (False, True),
    (False, True),
    [(1, 1, 1, None), (2, 3, 2, 1), (63, 5, 3, 8), (64, 4, 16, 64), (130, 2, 9, None)],
  )
]
# The kernels, interpreted on the CPU: every thread block costs time, so they are few and small.
# D is padded to a multiple of 128, T of 16, N to 8 or 16 (and split in groups beyond). A boundary
# leak is visible at weak decay, a wrong block of channels beyond 128 of them, and a term of the
# float32 gradients where no entry of a key is all of it.
KERNELS = [
  Check(Case(3, "ordinary", D=130, chunk=None), "pallas_interpret"),
  Check(
    Case(17, "weak", segments=True, chunk=None, activated=True), "pallas_interpret", jnp.bfloat16
  ),
]
KERNEL_SWEEP = [
  Check(Case(3, "extreme", D=130, chunk=None), "pallas_interpret"),
  Check(Case(17, "weak", segments=True, chunk=None), "pallas_interpret", jnp.bfloat16),
  Check(Case(17, "weak", chunk=None, activated=True), "pallas_interpret", jnp.bfloat16),
]
KERNEL_SWEEP += [
  Check(
    Case(T, strength, segments, D=130, N=N, chunk=None, activated=True), "pallas_interpret", dtype
  )
  for strength, segments, T, N, dtype in [
    ("extreme", True, 33, 16, jnp.bfloat16),
    ("ordinary", False, 50, 5, jnp.bfloat16),
    ("lasting", False, 16, 8, jnp.bfloat16),
    ("weak", True, 17, 20, jnp.bfloat16),
    ("weak", True, 17, 8, jnp.float32),
    ("weak", False, 1, 16, jnp.bfloat16),
  ]
]
KERNEL_SWEEP += [
  Check(
    Case(T, strength, segments, n % 3 > 0, D, N, None, n % 4 > 0), "pallas_interpret", dtypes[n % 2]
  )
  for dtypes in [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)]
  for n, (strength, segments, (T, D, N)) in enumerate(
    itertools.product(
      ("weak", "ordinary", "extreme", "lasting"),
      (False, True),
      [(1, 1, 1), (16, 130, 8), (33, 5, 16), (50, 3, 20)],
    )
  )
]
CHECKS = [
  *(Check(case) for n, case in enumerate(CASES) if n not in SLOW),
  Check(CASES[3], "associative"),
  Check(CASES[3], dtype=jnp.bfloat16),
  *KERNELS,
]
SWEEP = [
  *(Check(CASES[n]) for n in SLOW),
  Check(CASES[6], "associative"),
  Check(CASES[7], dtype=jnp.float16),
  *(Check(case, form) for form in ("chunked", "associative") for case in MANY),
  *KERNEL_SWEEP,
  *(
    check._replace(implementation="pallas_ampere_interpret")
    for check in KERNELS + KERNEL_SWEEP[3::3]
  ),
]


def _checked(scan) -> Checked:
  return Checked.of(
    scan,
    steps=scan.narrow,
    checks=CHECKS,
    sweep=SWEEP,
    small=Case(23, N=4, state=False),
    memory=lambda T: Case(T, D=16, N=16, chunk=8, state=False),
  )


LONGHORN_SCAN = _checked(longhorn.LONGHORN_SCAN)
SELECTIVE_SCAN = _checked(selective.SELECTIVE_SCAN)

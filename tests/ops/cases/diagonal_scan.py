"""diagonal_scan: its cases, and what it is held to."""

import itertools

import jax.numpy as jnp

from lnssm_jax.ops.diagonal_scan import cases
from lnssm_jax.ops.diagonal_scan.cases import Case
from tests.ops.checked import Check, Checked

# The lengths are on both sides of a chunk boundary; chunks of 64 are scanned, short ones are
# unrolled.
CASES = [
  Case(T=1),
  Case(T=2, complex_="ax", reverse=True),
  Case(T=15, strength="extreme", constant=True),
  Case(T=63, strength="weak", segments=True, chunk=9),
  Case(T=64, constant=True, segments=True, reverse=True),
  Case(T=65, complex_="ax", segments=True, strength="extreme", chunk=8),
  Case(T=65, reverse=True, chunk=64, strength="extreme"),
  Case(T=130, complex_="ax", constant=True, chunk=64, segments=True),
  Case(T=48, complex_="a", reverse=True, segments=True),
  Case(T=33, complex_="x", constant=True, strength="weak"),
  Case(T=1000, strength="weak", constant=True),
  Case(T=1000, complex_="ax", segments=True, strength="extreme", chunk=8),
]
SLOW = (7, 9, 11)
MANY = [
  Case(T, D, strength, complex_, constant, segments, reverse, chunk)
  for strength in ("weak", "ordinary", "extreme")
  for complex_ in ("", "a", "x", "ax")
  for constant in (False, True)
  for segments in (False, True)
  for reverse in (False, True)
  for T, D, chunk in [(1, 1, None), (63, 17, 8), (130, 8, 64), (257, 3, None)]
]
# The kernels, interpreted on the CPU: few and small. D is padded to a multiple of 128, T of 32. A
# boundary leak is visible at weak decay, a wrong block of channels beyond 128 of them. (Those that
# always run, in splits of a sequence: tests/kernels/test_diagonal_scan.py.)
KERNEL_SWEEP = [
  Check(Case(T=30, segments=True, strength="weak"), "pallas_interpret", jnp.bfloat16),
  Check(Case(T=30, D=130, complex_="ax", constant=True, reverse=True), "pallas_interpret"),
]
KERNEL_SWEEP += [
  Check(
    Case((1, 32, 40, 65)[n % 4], (5, 130)[n % 5 == 0], *options),
    "pallas_interpret",
    jnp.bfloat16 if n % 3 == 0 else jnp.float32,
  )
  for n, options in enumerate(
    itertools.product(
      ("weak", "extreme"), ("", "a", "x", "ax"), (False, True), (False, True), (False, True)
    )
  )
]


DIAGONAL_SCAN = Checked.of(
  cases.DIAGONAL_SCAN,
  steps=("decay", "decay_i", "x", "x_i"),
  checks=[
    *(Check(case) for n, case in enumerate(CASES) if n not in SLOW),
    *(Check(CASES[n], "associative") for n in (3, 4, 5)),
    Check(CASES[3], dtype=jnp.bfloat16),
  ],
  sweep=[
    *(Check(CASES[n]) for n in SLOW),
    *(Check(CASES[n], "associative") for n in (0, 8, 10)),
    Check(CASES[3], dtype=jnp.float16),
    *(Check(case, form) for form in ("chunked", "associative") for case in MANY),
    *KERNEL_SWEEP,
    *(check._replace(implementation="pallas_ampere_interpret") for check in KERNEL_SWEEP[::4]),
  ],
  small=Case(T=23, D=3, constant=True, chunk=8, state=False),
  variants=(Case(T=23, D=3, chunk=8, state=False),),
)

"""long_convolution: its cases, and what it is held to."""

import jax.numpy as jnp

from lnssm_jax.ops.long_convolution import cases
from lnssm_jax.ops.long_convolution.cases import Case
from tests.ops.checked import Check, Checked

# Lengths on both sides of a chunk boundary; kernels shorter and longer than the sequence.
TAPS = [
  Case(T=1, L=5, kernel="taps"),
  Case(T=2, L=9, kernel="taps", segments=True, strength="extreme"),
  Case(T=15, L=15, kernel="taps", strength="weak"),
  Case(T=63, L=7, kernel="taps", segments=True),
  Case(T=64, L=150, kernel="taps", strength="extreme"),
  Case(T=65, L=1, kernel="taps", segments=True),
  Case(T=1000, L=1000, kernel="taps", state=False, strength="weak"),
  Case(T=1000, L=400, kernel="taps", segments=True, strength="weak"),
]
SUMS = [
  Case(T=1, strength="extreme"),
  Case(T=2, N=1, kernel="real", segments=True, direct=False),
  Case(T=15, strength="extreme", segments=True),
  Case(T=63, kernel="real", strength="weak"),
  Case(T=64, strength="weak", segments=True, chunk=16),
  Case(T=65, strength="lasting", chunk=64, state=False),
  Case(T=1000, strength="weak", D=2, chunk=None),
  Case(T=1000, strength="extreme", segments=True),
]
MANY_TAPS = [
  Case(T, "taps", D, L, 1, strength, segments, state)
  for strength in ("weak", "ordinary", "extreme")
  for segments in (False, True)
  for state in (False, True)
  for T, D, L in [(63, 5, 64), (130, 3, 40), (257, 1, 300)]
]
MANY_SUMS = [
  Case(T, kernel, D, 1, N, strength, segments, state, direct, chunk)
  for strength in ("weak", "ordinary", "extreme", "lasting")
  for kernel in ("real", "complex")
  for segments in (False, True)
  for state in (False, True)
  for T, D, N, direct, chunk in [(63, 5, 3, True, 16), (130, 3, 5, False, None)]
]


LONG_CONVOLUTION = Checked.of(
  cases.LONG_CONVOLUTION,
  steps=("x",),
  implementations=("chunked", "reference", "associative"),
  checks=[
    *(Check(case, "fft") for case in TAPS[:-1]),
    *(Check(case) for case in (TAPS[4], TAPS[6])),
    *(Check(case) for case in SUMS[:-2]),
    Check(SUMS[3], "associative"),
    Check(TAPS[3], "fft", jnp.bfloat16),
    Check(SUMS[4], dtype=jnp.bfloat16),
  ],
  sweep=[
    Check(TAPS[-1], "fft"),
    *(Check(case) for case in SUMS[-2:]),
    Check(SUMS[4], "associative"),
    Check(TAPS[3], "fft", jnp.float16),
    *(Check(case, form) for case in MANY_TAPS for form in ("fft", "chunked")),
    *(Check(case, form) for case in MANY_SUMS for form in ("chunked", "associative")),
  ],
  small=Case(T=23, state=False),
  variants=(Case(T=23, kernel="taps", L=9, state=False),),
  memory=lambda T: Case(T, D=8, N=32, chunk=64, state=False),
)

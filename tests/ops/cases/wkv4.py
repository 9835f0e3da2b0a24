"""wkv4: its cases, and what it is held to."""

import itertools

import jax.numpy as jnp

from lnssm_jax.ops.wkv4 import cases
from lnssm_jax.ops.wkv4.cases import Case
from tests.ops.checked import Check, Checked

# The lengths are on both sides of a chunk boundary; chunks of 64 are scanned, short ones are
# chains.
CASES = [
  Case(T=1),
  Case(T=2, keys="two", strength="weak"),
  Case(T=15, strength="extreme", segments=True),
  Case(T=63, strength="weak", keys="wide", chunk=7),
  Case(T=64, keys="wide", strength="extreme", segments=True),
  Case(T=65, keys="two", strength="extreme", segments=True, chunk=5),
  Case(T=64, state=False, strength="weak"),
  Case(T=130, keys="wide", strength="extreme", chunk=65),
  Case(T=128, segments=True, chunk=64),
  Case(T=1000, strength="weak"),
  Case(T=1000, keys="wide", strength="extreme"),
]
SLOW = (6, 7, 9, 10)
MANY = [
  Case(T, D, strength, keys, segments, state, chunk)
  for strength in ("weak", "ordinary", "extreme")
  for keys in ("ordinary", "wide", "two")
  for segments in (False, True)
  for state in (False, True)
  for T, D, chunk in [(63, 17, 16), (130, 8, 64)]
]
# The kernels, interpreted on the CPU: few and small. D is padded to a multiple of 128, T of
# 32. (Those that always run, in splits of a sequence: tests/kernels/test_wkv4.py.)
KERNEL_SWEEP = [
  Check(
    Case(T=40, D=130, strength="extreme", keys="wide", segments=True, chunk=None),
    "pallas_interpret",
  ),
]
KERNEL_SWEEP += [
  Check(
    Case((1, 32, 40, 65)[n % 4], (5, 130)[n % 5 == 0], *options, chunk=None),
    "pallas_interpret",
    jnp.bfloat16 if n % 3 == 0 else jnp.float32,
  )
  for n, options in enumerate(
    itertools.product(
      ("weak", "extreme"), ("ordinary", "wide", "two"), (False, True), (False, True)
    )
  )
]


WKV4 = Checked.of(
  cases.WKV4,
  number_fields=("strength", "keys"),
  steps=("k", "v"),
  implementations=("chunked", "reference", "associative"),
  checks=[
    *(Check(case) for n, case in enumerate(CASES) if n not in SLOW),
    Check(CASES[5], "associative"),
    Check(CASES[4], dtype=jnp.bfloat16),
  ],
  sweep=[
    *(Check(CASES[n]) for n in SLOW),
    *(Check(CASES[n], "associative") for n in (3, 8)),
    Check(CASES[4], dtype=jnp.float16),
    *(Check(case, form) for case in MANY for form in ("chunked", "associative")),
    *KERNEL_SWEEP,
    *(check._replace(implementation="pallas_ampere_interpret") for check in KERNEL_SWEEP[::4]),
  ],
  small=Case(T=23, state=False),
  variants=(Case(T=23, keys="wide", state=False),),
)

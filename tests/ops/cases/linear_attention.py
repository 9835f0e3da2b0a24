"""linear_attention: its cases, and what it is held to."""

import dataclasses
import itertools

import jax.numpy as jnp

from lnssm_jax.ops.linear_attention import cases
from lnssm_jax.ops.linear_attention.cases import Case
from tests.ops.checked import Check, Checked

# Every kind of decay with every option at least once; the lengths are on both sides of a chunk
# boundary.
CASES = [
  Case(decay=None),
  Case(decay=None, normalize=True, segments=True, T=33),
  Case(decay="H"),
  Case(decay="H", bonus=True, normalize=True, strength="extreme"),
  Case(decay="HK", normalize=True, strength="extreme"),
  Case(decay="HK", normalize=True, strength="weak", T=64),
  Case(decay="HK", bonus=True, normalize=True, segments=True),
  Case(decay="BTH", strength="extreme", segments=True, own_weight=True),
  Case(decay="BTH", bonus=True, strength="weak"),
  Case(decay="BTHK", strength="extreme", segments=True),
  Case(decay="BTHK", bonus=True, normalize=True, strength="weak"),
  Case(decay=None, value_decay="HV", segments=True),
  Case(decay="BTHK", value_decay="BTHV", bonus=True, strength="extreme", segments=True),
  Case(decay="BTH", value_decay="HV", strength="extreme", own_weight=True),
  Case(
    decay="HK", normalize=True, segments=True, strength="extreme", chunk=None, H=1, K=16, V=32, T=65
  ),
  Case(decay="BTHK", bonus=True, T=9, H=4, shared=2),
  Case(decay="BTHK", normalize=True, segments=True, T=17, H=4, readers=2, strength="weak"),
  Case(decay="BTH", value_decay="HV", bonus=True, T=9, H=4, readers=4),
  Case(decay="HK", T=9, H=4, readers=2, own_decays=True, normalize=True),
  Case(decay="BTH", T=9, H=2, segments=True, own_weight=True, ranks=3),
]
LENGTHS, LONGER = (
  [Case(T=T, normalize=True, strength="extreme", decay=decay, chunk=None) for T, decay in of]
  for of in ([(1, "HK"), (2, "BTH"), (65, "BTHK")], [(63, "HK"), (1000, "HK")])
)
SHAPES = [(1, 3, 1, None), (63, 17, 5, 32), (130, 8, 8, None)]  # T, K, V, chunk
COMBINATIONS = [
  options
  for options in itertools.product(
    (None, "H", "HK", "BTH", "BTHK"),
    ("weak", "ordinary", "extreme"),
    (None, "HV", "BTHV"),  # value decay
    (False, True),  # bonus
    (False, True),  # normalize
    (False, True),  # segments
  )
  if not (options[2] and options[4])
]
MANY = [
  Case(*SHAPES[n % 3][:3], *options, chunk=SHAPES[n % 3][3])
  for n, options in enumerate(COMBINATIONS)
]
# The kernels, interpreted on the CPU: every CTA costs time, so they are few and small.
# K is padded to 64 or 128 (and cut in two beyond), V to 64, 128 or 256 (beyond, to some of 256), T
# to a multiple of 64.
# (More chunks with weak decays: `PARTS` below.)
KERNELS = [
  Case(T=65, K=16, V=120, decay="H", strength="weak", H=2),
  Case(T=65, K=16, V=24, decay="HK", strength="weak", normalize=True, H=2),
  Case(T=63, K=20, V=136, decay="BTHK", bonus=True, normalize=True, H=1),
  Case(T=1, K=20, V=24, decay="HK", bonus=True, normalize=True, H=2),
  Case(T=15, K=136, V=16, decay="H", normalize=True, H=2),  # two groups of keys, two heads
  Case(T=65, K=16, V=24, decay="BTH", strength="weak", H=4, shared=2),
  Case(T=65, K=16, V=24, decay="BTHK", strength="weak", H=2, readers=2, segments=True),
  Case(T=65, K=16, V=24, decay="BTH", strength="weak", H=2, readers=2, normalize=True),
  Case(T=1, K=16, V=32, decay="BTH", normalize=True, H=4, readers=2, bonus=True),
]
# Like `PARTS`, but with decays that leave nothing of a state, or in one chunk.
MORE_KERNELS = [
  Case(T=65, K=20, V=24, decay="BTH", strength="extreme", normalize=True, segments=True, H=1),
  Case(T=64, K=16, V=24, decay="HK", bonus=True, segments=True, H=2),
  Case(T=65, K=128, V=24, decay="HK", strength="extreme", normalize=True, H=1),
  Case(T=65, K=16, V=24, decay="BTHK", strength="extreme", segments=True, H=1),
  Case(T=20, K=16, V=24, decay="BTH", strength="weak", segments=True, own_weight=True, ranks=3),
]
# In two splits of two chunks, a state that lasts from chunk to chunk and from split to split, with
# documents that end inside the second chunk and the third: what is dropped, or passes a document's
# boundary, changes much. Two blocks of channels: those of the second decay so fast that the factors
# of the first would be infinite there. (Of columns: `KERNELS`.)
PARTS = [
  Case(*(150, 16, 24, "BTH", "weak"), normalize=True, segments=True, H=1, own_weight=True),
  Case(*(150, 120, 24, "HK", "uneven"), bonus=True, normalize=True, segments=True, H=1),
  Case(T=150, K=120, V=24, decay="BTHK", strength="uneven", segments=True, H=1),
]
KERNEL_SWEEP = [
  Case(T=T, K=K, V=V, decay=decay, strength=strength, bonus=bonus, normalize=normalize, H=1)
  for n, (decay, strength, bonus, normalize) in enumerate(
    itertools.product(
      (None, "H", "HK", "BTH", "BTHK"), ("weak", "extreme"), (False, True), (False, True)
    )
  )
  for T, K, V in [[(65, 40, 16), (15, 128, 128), (130, 20, 24), (64, 16, 72)][n % 4]]
]
KERNEL_SWEEP += [
  Case(T=65, K=136, V=24, decay=decay, bonus=decay == "HK", normalize=True, segments=True, H=1)
  for decay in ("H", "HK", "BTHK")
]
KERNEL_SWEEP += [dataclasses.replace(case, segments=True, T=129) for case in KERNEL_SWEEP[::3]]
KERNEL_SWEEP += [
  Case(T=T, K=16, V=24, decay=decay, normalize=True, segments=True, H=4, shared=shared)
  for T, decay, shared in [(65, "BTH", 4), (15, "BTHK", 2), (130, "H", 2), (1, "H", 4)]
]
KERNEL_SWEEP += [
  Case(T=T, K=K, V=24, decay=decay, normalize=True, H=4, readers=2, own_decays=own, bonus=bonus)
  for T, K, decay, own, bonus in [
    (150, 16, "H", True, False),
    (65, 72, "HK", False, True),
    (15, 136, "BTHK", False, False),
    (65, 16, "BTHK", True, False),
    (1, 20, "HK", True, False),
  ]
]
KERNEL_SWEEP += [
  Case(T=T, K=K, V=V, decay=decay, segments=True, H=2, own_weight=True, readers=readers)
  for T, K, V, decay, readers in [
    (130, 16, 24, "BTH", 1),
    (65, 136, 24, "BTH", 1),
    (65, 16, 264, None, 2),
    (1, 16, 32, "BTH", 2),
  ]
]
KERNEL_SWEEP += [
  Case(*sizes, segments=True, H=2, own_weight=own, ranks=ranks, readers=readers)
  for *sizes, own, ranks, readers in [
    (40, 16, 24, "BTH", True, 4, 1),
    (33, 16, 24, "H", False, 2, 2),
    (1, 16, 24, None, True, 4, 1),
    (3, 16, 24, "BTH", True, 64, 1),
  ]
]
KERNEL_SWEEP += [
  Case(T=65, K=128, V=24, decay="HK", strength="weak", normalize=True, H=1),
  Case(T=2, K=16, V=24, decay=None, normalize=True, H=2, state=False),
  Case(T=15, K=72, V=80, decay="BTHK", strength="weak", segments=True, H=1, state=False),
  Case(T=15, K=136, V=136, decay="BTHK", bonus=True, H=1),
  Case(T=65, K=16, V=136, decay="HK", normalize=True, segments=True, H=1),
  Case(T=65, K=16, V=136, decay="BTHK", strength="weak", segments=True, H=1),
  Case(T=15, K=136, V=264, decay="BTHK", bonus=True, normalize=True, H=1),
]


def _on_kernels(case: Case, implementation: str = "pallas_interpret") -> Check:
  return Check(dataclasses.replace(case, chunk=None), implementation, jnp.bfloat16)


_AMPERE = [*KERNELS, *MORE_KERNELS, *KERNEL_SWEEP[::2]]


LINEAR_ATTENTION = Checked.of(
  cases.LINEAR_ATTENTION,
  steps=("q", "k", "v", "log_decay", "value_log_decay", "own_weight"),
  implementations=("chunked", "reference", "associative"),
  checks=[
    *(Check(case) for case in CASES + LENGTHS),
    *(Check(CASES[n], "associative") for n in (3, 9, 11)),
    *(Check(CASES[n], dtype=jnp.bfloat16) for n in (4, 9, 12)),
    *(_on_kernels(case) for case in KERNELS),
  ],
  sweep=[
    *(Check(case) for case in LONGER),
    *(Check(CASES[n], "associative") for n in (1, 5, 7)),
    *(_on_kernels(case) for case in MORE_KERNELS),
    Check(CASES[4], dtype=jnp.float16),
    *(Check(case) for case in MANY),
    *(Check(CASES[n], dtype=jnp.bfloat16) for n in (7, 14)),
    *(Check(dataclasses.replace(LENGTHS[0], T=T, decay=d)) for T, d in [(15, "BTHK"), (64, "BTH")]),
    *(Check(case, "associative") for case in MANY[::5]),
    *(_on_kernels(case) for case in KERNEL_SWEEP),
    *(_on_kernels(case, "pallas_ampere_interpret") for case in _AMPERE),
  ],
  small=Case(T=23, K=3, V=4, H=2, normalize=True, chunk=8, state=False),
  variants=(Case(T=23, K=3, V=4, H=2, decay="BTHK", bonus=True, chunk=8, state=False),),
  memory=lambda T: Case(T, H=1, K=32, V=32, decay="BTHK", chunk=16, state=False),
  isolates_documents=False,
)

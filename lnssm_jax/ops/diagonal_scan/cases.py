"""diagonal_scan: its arguments and checks.

A complex array is passed as its real and imaginary parts, so that all gradients are of real
numbers.
"""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import B, Check, Scan, log_decay


@dataclass(frozen=True)
class Case:
  """One set of arguments. `complex_` names the complex ones: "", "a", "x" or "ax"."""

  T: int = 37
  D: int = 5
  strength: str = "ordinary"
  complex_: str = ""
  constant: bool = False
  segments: bool = False
  reverse: bool = False
  chunk: int | None = None
  state: bool = True

  def __str__(self):
    flags = [name for name in ("constant", "segments", "reverse") if getattr(self, name)]
    return "-".join(
      [
        self.strength,
        f"complex_{self.complex_ or 'none'}",
        *flags,
        f"T{self.T}D{self.D}C{self.chunk}",
      ]
    )


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


def _draw(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Decays of a modulus near 1 (weak), ordinary, or from exp(-20) to 1 with 0 among them."""
  shape = (case.D,) if case.constant else (B, case.T, case.D)
  if case.strength == "extreme":
    log = -20 * rng.random(shape) ** 2
    log.flat[0], log.flat[-1] = -20, 0
    modulus = np.exp(log)
    modulus[..., case.D // 2] = 0
  else:
    modulus = np.exp(log_decay(rng, shape, case.strength))
  inputs = {"x": rng.normal(size=(B, case.T, case.D)), "state.h": rng.normal(size=(B, case.D))}
  if "a" in case.complex_:
    phase = rng.uniform(-np.pi, np.pi, size=shape)
    # Rounded to float32 the modulus may exceed 1 by a rounding, which 1000 steps must not amplify.
    modulus = modulus * (1 - 1e-6)
    inputs |= {"decay": modulus * np.cos(phase), "decay_i": modulus * np.sin(phase)}
  else:
    inputs["decay"] = modulus * np.where(rng.random(shape) < 0.2, -1, 1)
  if "x" in case.complex_:
    inputs["x_i"] = rng.normal(size=(B, case.T, case.D))
  if case.complex_:
    inputs["state.h_i"] = rng.normal(size=(B, case.D))
  if not case.state:
    inputs = {n: x for n, x in inputs.items() if not n.startswith("state.")}
  return inputs


def _joined(real, imaginary=None):
  if imaginary is None:
    return real
  wide = jnp.promote_types(real.dtype, jnp.float32)  # there is no complex of two narrow numbers
  return jax.lax.complex(real.astype(wide), imaginary.astype(wide))


def _state(h, h_i=None) -> ops.DiagonalState:
  return ops.DiagonalState(_joined(h, h_i))


def _arguments(case: Case, inputs):
  arrays = (_joined(inputs[n], inputs.get(n + "_i")) for n in ("decay", "x"))
  return tuple(arrays), {"reverse": case.reverse}


def _compared(out, state: ops.DiagonalState):
  parts = lambda x: (x.real, x.imag) if jnp.iscomplexobj(x) else x
  return {"out": parts(out), "state": parts(state.h)}


DIAGONAL_SCAN = Scan(
  function=ops.diagonal_scan,
  state=_state,
  draw=_draw,
  arguments=_arguments,
  narrow=("x", "x_i"),
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
  measured=lambda T, strength: Case(T, D=8, strength=strength),
  measured_too={
    "complex": lambda T, strength: Case(T, D=8, strength=strength, complex_="ax"),
    "constant": lambda T, strength: Case(T, D=8, strength=strength, constant=True),
  },
  compared=_compared,
)

"""long_convolution: its arguments and checks, for both kinds of kernel.

Complex arrays are passed as their real and imaginary parts, so that all gradients are of real
numbers.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.causal_conv1d.types import ConvState
from lnssm_jax.ops.core.cases import B, Check, Scan, log_decay
from lnssm_jax.ops.long_convolution.api import long_convolution
from lnssm_jax.ops.long_convolution.types import (
  ExponentialKernel,
  ExponentialState,
)


@dataclass(frozen=True)
class Case:
  """One set of arguments. `kernel` is "taps", or a sum of exponentials with "complex" or "real"."""

  T: int = 37
  kernel: str = "complex"
  D: int = 3
  L: int = 37  # taps
  N: int = 4  # exponentials
  strength: str = "ordinary"
  segments: bool = False
  state: bool = True
  direct: bool = True
  chunk: int | None = 8

  def __str__(self):
    flags = [name for name in ("segments", "state") if getattr(self, name)]
    size = f"L{self.L}" if self.kernel == "taps" else f"N{self.N}C{self.chunk}"
    return "-".join([self.kernel, self.strength, *flags, f"T{self.T}D{self.D}{size}"])


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


def _draw(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Taps are noise under an exponential for each channel; phases of poles are any angles."""
  T, D, L, N = case.T, case.D, case.L, case.N
  inputs = {"x": rng.normal(size=(B, T, D))}
  if case.kernel == "taps":
    decay = np.exp(np.arange(L)[:, None] * log_decay(rng, (D,), case.strength))
    inputs["kernel"] = rng.normal(size=(L, D)) * decay
    if case.state:
      inputs["state.inputs"] = rng.normal(size=(B, L - 1, D))
    return inputs
  inputs["log_pole"] = log_decay(rng, (D, N), case.strength)
  inputs["coefficient"] = rng.normal(size=(D, N))
  if case.state:
    inputs["state.h"] = rng.normal(size=(B, D, N))
  if case.kernel == "complex":
    inputs["log_pole_i"] = rng.uniform(-np.pi, np.pi, size=(D, N))
    inputs["coefficient_i"] = rng.normal(size=(D, N))
    if case.state:
      inputs["state.h_i"] = rng.normal(size=(B, D, N))
  if case.direct:
    inputs["direct"] = rng.normal(size=D)
  return inputs


def _arguments(case: Case, inputs):
  if case.kernel == "taps":
    return (inputs["x"], inputs["kernel"]), {}

  def array(name):
    imaginary = inputs.get(f"{name}_i")
    return inputs[name] if imaginary is None else jax.lax.complex(inputs[name], imaginary)

  kernel = ExponentialKernel(array("log_pole"), array("coefficient"), inputs.get("direct"))
  return (inputs["x"], kernel), {}


def _state(inputs: Any = None, h=None, h_i=None):
  if h is None:
    return ConvState(inputs)
  return ExponentialState(h if h_i is None else jax.lax.complex(h, h_i))


def _compared(out, state):
  parts = [state[0].real, state[0].imag] if jnp.iscomplexobj(state[0]) else [state[0]]
  return {"out": out, "state": parts}


LONG_CONVOLUTION = Scan(
  function=long_convolution,
  state=_state,
  draw=_draw,
  arguments=_arguments,
  narrow=("x", "kernel"),
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
  measured=lambda T, strength: Case(T, D=2, strength=strength, chunk=None),
  measured_too={"taps": lambda T, strength: Case(T, "taps", D=2, L=T, strength=strength)},
  longest_reference={"taps": 4096},
  memory=lambda T: Case(T, D=8, N=32, chunk=64, state=False),
  compared=_compared,
)

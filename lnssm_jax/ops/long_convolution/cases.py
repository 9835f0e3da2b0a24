"""long_convolution: its arguments and cases, for both kinds of kernel.

Complex arrays are passed as their real and imaginary parts, so that all gradients are of real
numbers.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.causal_conv1d.types import ConvState
from lnssm_jax.ops.core.cases import B, Scan, log_decay
from lnssm_jax.ops.long_convolution.api import long_convolution
from lnssm_jax.ops.long_convolution.types import ExponentialKernel, ExponentialState


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
  measured=lambda T, strength: Case(T, D=2, strength=strength, chunk=None),
  measured_too={"taps": lambda T, strength: Case(T, "taps", D=2, L=T, strength=strength)},
  longest_reference={"taps": 4096},
  compared=_compared,
)

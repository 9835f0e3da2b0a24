"""diagonal_scan: its arguments and cases.

A complex array is passed as its real and imaginary parts, so that all gradients are of real
numbers.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import B, Scan, log_decay


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
  measured=lambda T, strength: Case(T, D=8, strength=strength),
  measured_too={
    "complex": lambda T, strength: Case(T, D=8, strength=strength, complex_="ax"),
    "constant": lambda T, strength: Case(T, D=8, strength=strength, constant=True),
  },
  compared=_compared,
)

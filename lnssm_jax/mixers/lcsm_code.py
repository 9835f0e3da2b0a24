"""The codes of linear complexity sequence models, what each means, and the op that computes it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.mixers.common.checks import check_choice

# By the digit a of a code; they act on expansion and shrinkage.
ACTIVATIONS = (
  lambda x: x,
  jax.nn.relu,
  jax.nn.sigmoid,
  lambda x: 1 + jax.nn.elu(x),
  jax.nn.silu,
  jax.nn.elu,
  lambda x: jnp.square(jax.nn.relu(x)),
  jnp.square,
)
_NON_NEGATIVE = (1, 2, 3, 6, 7)
_SIGMOID = 2

# Codes 2 to 5 as published, and with the data-dependent ones constant and the constant ones
# data-dependent, each along the axis that it has.
COLORINGS: dict[str, dict[str, str]] = {
  "source": {},
  "exchanged": {"2": "5", "3": "4", "4": "3", "5": "2"},
}


class Oscillation(NamedTuple):
  """The kind of o: along which axes of the state [k, D] it varies, and what it depends on."""

  axes: str  # "none", "key", "value", "key value" (a product of both), "full"; or another kind
  data_dependent: bool = False
  # What may be learned or not: its value as published, or None where there is no such part.
  learned: bool | None = None
  reason: str = ""  # why `learned` may not be changed


_LOGIT = "its constant factor stands inside the sigmoid and has no published value"
OSCILLATIONS = {
  "0": Oscillation("full", False, True),
  "1": Oscillation("key value", True),
  "2": Oscillation("value", True),
  "3": Oscillation("key", True),
  "4": Oscillation("key", False, True),
  "5": Oscillation("value", False, True),
  "6": Oscillation("full", True, True, _LOGIT),
  "7": Oscillation("full", True, True, _LOGIT),
  "8": Oscillation("full", True, True, _LOGIT),
  "9": Oscillation("full", True, True, _LOGIT),
  "10": Oscillation("none"),
  "11": Oscillation("rotation", False, False),
  "m1": Oscillation("delta", True),
  "m2": Oscillation("delta", True),
  "m3": Oscillation("key", True),
  "ssm": Oscillation("step", True),
}


class Code(NamedTuple):
  """A code e-o-s-a, read: expansion, oscillation, shrinkage, activation."""

  expand: bool  # whether e depends on the token; else it is a matrix [k, D]
  oscillate: str  # a key of OSCILLATIONS, in the published numbering
  shrink: bool  # as expand, of s
  activation: int

  @property
  def kind(self) -> Oscillation:
    """The kind of its oscillation."""
    return OSCILLATIONS[self.oscillate]

  @property
  def rotates(self) -> bool:
    """Whether the state rotates, which is computed by cosines and sines of positions."""
    return self.kind.axes == "rotation" and self.op != "long_convolution"

  @property
  def op(self) -> str:
    """The op of `lnssm_jax.ops` that computes it: the cheapest exact one."""
    axes, data_dependent = self.kind.axes, self.kind.data_dependent
    if axes == "step":
      return "selective_scan"
    if axes == "delta":
      return "delta_rule"
    if self.expand and self.shrink:
      if axes != "full":
        return "linear_attention"
      return "elementwise_decay_scan" if data_dependent else "selective_scan"
    if axes in ("none", "value"):
      return "diagonal_scan"
    constant = not (self.expand or self.shrink or data_dependent)
    return "long_convolution" if constant else "elementwise_decay_scan"


def read_code(code: Any, coloring: str = "source") -> Code:
  """Reads "e-o-s-a", or "0" for the state-space form.

  Args:
    code: e and s are 0 (a matrix) or 1 (of the token), o a key of OSCILLATIONS but "ssm", a the
      number of an activation.
    coloring: a key of COLORINGS; the result is in the numbering of "source".

  Raises:
    ValueError: the code or the coloring is unknown, or the parts of a code contradict each other.
  """
  check_choice("coloring", coloring, COLORINGS)
  if str(code) == "0":
    return Code(True, "ssm", True, 0)
  parts = code.split("-") if isinstance(code, str) else []
  known = OSCILLATIONS.keys() - {"ssm"}
  activations = [str(number) for number in range(len(ACTIVATIONS))]
  choices = (("0", "1"), known, ("0", "1"), activations)
  if len(parts) != 4 or any(x not in y for x, y in zip(parts, choices, strict=True)):
    raise ValueError(
      f"code={code!r} must be 'e-o-s-a', such as '1-1-1-4': e and s 0 or 1, o 0 to 11 or m1, m2, "
      f"m3, and a 0 to {len(ACTIVATIONS) - 1}; or '0' for the state-space form."
    )
  e, o, s, a = parts
  read = Code(e == "1", COLORINGS[coloring].get(o, o), s == "1", int(a))
  if o.startswith("m") and not (read.expand and read.shrink):
    raise ValueError(
      f"code={code!r}: {o} makes the oscillation of the expansion, one vector per token; use "
      f"'1-{o}-1-{a}', because a constant expansion is a matrix."
    )
  if o == "m2" and read.activation not in _NON_NEGATIVE:
    raise ValueError(
      f"code={code!r}: the state of m2 grows without bound where its two unit vectors have a "
      f"negative product; use an activation without negative values, a in {_NON_NEGATIVE}."
    )
  if o == "m3" and read.activation != _SIGMOID:
    raise ValueError(
      f"code={code!r}: m3 decays by 1 - e, which needs e between 0 and 1; use '1-m3-1-{_SIGMOID}', "
      "the sigmoid."
    )
  return read


def is_learned(code: Code, learned: bool | None) -> bool:
  """Whether the constant part of o is a parameter; None takes what is published.

  Raises:
    ValueError: `learned` is given for a code that leaves no choice.
  """
  kind = code.kind
  if learned is None or learned == kind.learned:
    return bool(kind.learned)
  if not isinstance(learned, bool):
    raise ValueError(f"learned={learned!r} must be True, False or None.")
  reason = kind.reason or "it has no constant part"
  if kind.learned is None or kind.reason:
    raise ValueError(
      f"learned={learned} does not apply to oscillation {code.oscillate}: {reason}. Leave it out."
    )
  return learned

"""Checks of a scan, whose arguments `lnssm_jax.ops.core.cases` draws."""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from lnssm_jax.ops.core.cases import Arrays, Scan


class Check(typing.NamedTuple):
  """A case to be run by an implementation; inputs that may be narrow have this dtype."""

  case: Any
  implementation: str = "chunked"
  dtype: Any = jnp.float32

  def __str__(self):
    return f"{self.implementation}-{jnp.dtype(self.dtype).name}-{self.case}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked(Scan):
  """A scan with its checks; tests/ops/contract.py runs them.

  scan = SCANS["linear_attention"]  # of tests.ops.cases
  case = scan.checks[0].case  # Case(T=37, decay=None, ...)
  scan.over_time(case, scan.inputs(case))  # names of inputs with a time axis: ["q", "k", "v"]
  scan.program_of(case)  # the case that stands for all of its compiled program
  """

  steps: tuple[str, ...]  # inputs with a time axis (axis 1)
  checks: Sequence[Check]  # values and gradients against float64, always
  sweep: Sequence[Check]  # the same, every combination: slow
  small: Any  # a short case without state and segments, for the promises
  # Other cases like it: they too must be split, packed and causal.
  variants: Sequence[Any] = ()
  # A case of a length, without state and segments, whose state is larger than the arrays of a step,
  # so that an array with a state for every step would be seen. None: the state is not.
  memory: Callable[[int], Any] | None = None
  # Fields of a case on which the numbers of its inputs depend, and nothing else: cases that differ
  # in them alone run the same compiled program.
  number_fields: tuple[str, ...] = ("strength",)
  implementations: tuple[str, ...] = ("chunked", "associative", "reference")  # as preferred
  # An infinity in one packed document does not reach the others, whatever the arguments.
  isolates_documents: bool = True

  @classmethod
  def of(cls, scan: Scan, **checked: Any) -> "Checked":
    """A scan of `lnssm_jax.ops.cases` with these fields."""
    return cls(**vars(scan), **checked)

  def program_of(self, case: Any) -> Any:
    """The case that stands for all that run the same compiled program."""
    names = set(self.number_fields) & {field.name for field in dataclasses.fields(case)}
    numbers = {name: "ordinary" for name in names if getattr(case, name) is not None}
    return dataclasses.replace(case, **numbers)

  def over_time(self, case: Any, inputs: Arrays) -> list[str]:
    """Names of those of a case's inputs that have a time axis: a decay may be constant."""
    return [n for n in self.steps if n in inputs and inputs[n].shape[1:2] == (case.T,)]

"""What the contract needs to know of a scan, and how its arguments are drawn.

The same descriptions serve the tests, the table of errors (`benchmarks.numerics`) and the timings
(`benchmarks.scans`).
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

B = 2

Arrays = Mapping[str, Any]


class Case(typing.Protocol):
  """One set of arguments. Each scan has its own frozen dataclass, with more fields."""

  @property
  def T(self) -> int: ...

  @property
  def strength(self) -> str: ...  # of the decay: "weak", "ordinary", "extreme"

  @property
  def segments(self) -> bool: ...

  @property
  def chunk(self) -> int | None: ...


class Check(typing.NamedTuple):
  """A case to be run by an implementation; inputs that may be narrow have this dtype."""

  case: Any
  implementation: str = "chunked"
  dtype: Any = jnp.float32

  def __str__(self):
    return f"{self.implementation}-{jnp.dtype(self.dtype).name}-{self.case}"


@dataclass(frozen=True, kw_only=True)
class Scan:
  """A scan, its arguments, and what it is held to.

  Inputs are a dictionary of float64 arrays: the public function's array arguments by name, and the
  fields of the initial state as "state.<field>" (left out: an empty state).
  """

  function: Callable[..., Any]  # the public function
  state: Callable[..., Any]  # of fields by name
  draw: Callable[[Any, np.random.Generator], dict[str, np.ndarray]]  # the inputs of a case
  # The public function's arguments of a case and its inputs, without initial_state, segment_ids,
  # implementation and chunk_size.
  arguments: Callable[[Any, Arrays], tuple[tuple, dict[str, Any]]]
  narrow: tuple[str, ...]  # inputs that may have a narrow dtype; the others are float32
  steps: tuple[str, ...]  # inputs with a time axis (axis 1)
  checks: Sequence[Check]  # values and gradients against float64, always
  sweep: Sequence[Check]  # the same, every combination: slow
  small: Any  # a short case without state and segments, for the promises
  # Other cases like it: they too must be split, packed and causal.
  variants: Sequence[Any] = ()
  # A case of a length and a strength of the decay, small otherwise and with the default chunk, for
  # the table of errors.
  measured: Callable[[int, str], Any]
  measured_too: Mapping[str, Callable[[int, str], Any]] = field(default_factory=dict)  # by a label
  strengths: tuple[str, ...] = ("weak", "ordinary", "extreme", "lasting")  # those of `measured`
  # Where the reference needs the square of the length: beyond which it is not run, by label.
  longest_reference: Mapping[str, int] = field(default_factory=dict)
  # A case of a length, without state and segments, whose state is larger than the arrays of a step,
  # so that an array with a state for every step would be seen. None: the state is not.
  memory: Callable[[int], Any] | None = None
  implementations: tuple[str, ...] = ("chunked", "associative", "reference")  # as preferred
  # What is compared of an output and a state, as real arrays.
  compared: Callable[[Any, Any], Any] = lambda out, state: {"out": out, "state": state}
  # Inf in one packed document does not reach the others, whatever the arguments.
  isolates_documents: bool = True

  def inputs(self, case: Any, seed: int = 0) -> dict[str, np.ndarray]:
    return self.draw(case, np.random.default_rng(seed))

  def over_time(self, case: Any, inputs: Arrays) -> list[str]:
    """Names of those of a case's inputs that have a time axis: a decay may be constant."""
    return [n for n in self.steps if n in inputs and inputs[n].shape[1:2] == (case.T,)]

  def bind(self, case: Any, inputs: Arrays, **options) -> tuple[tuple, dict[str, Any]]:
    """The public function's arguments; `options` go before what the case says."""
    args, kwargs = self.arguments(case, inputs)
    fields = {n.removeprefix("state."): x for n, x in inputs.items() if n.startswith("state.")}
    kwargs |= {
      "initial_state": self.state(**fields) if fields else None,
      "segment_ids": segment_ids(case.T) if case.segments else None,
      "chunk_size": case.chunk,
    }
    return args, kwargs | options

  def __call__(self, case: Any, inputs: Arrays, **options):
    """(out, state) of the public function; `options` as in `bind`."""
    args, kwargs = self.bind(case, inputs, **options)
    return self.function(*args, **kwargs)


def segment_ids(length: int):
  """Ids that change often, at the last step too, skip numbers and come back to an earlier one."""
  changes = np.random.default_rng(1).random((B, length)) < 0.15
  changes[0, -1] = True
  return jnp.asarray(3 * (np.cumsum(changes, axis=1) % 2), jnp.int32)


def log_decay(rng: np.random.Generator, shape: tuple[int, ...], strength: str) -> np.ndarray:
  """Log decays: weak (near 0), ordinary, or extreme: from -20 a step to 0, ends included.

  Or "lasting", the same 1e-6 everywhere: a decay rounded to float32 is then wrong at every step.
  """
  if strength == "lasting":
    return np.full(shape, -1e-6)
  if strength in ("weak", "ordinary"):
    return -np.exp(rng.normal(size=shape) - (7 if strength == "weak" else 1))
  if strength != "extreme":
    raise ValueError(f"strength={strength!r} is unknown")
  decay = -20 * rng.random(shape) ** 2
  decay.flat[0], decay.flat[-1] = -20, 0
  return decay

"""Cases of an op, for tests and benchmarks, and how its arguments are drawn.

The same descriptions serve the tests, the table of errors (`benchmarks.numerics`) and the timings
(`benchmarks.scans`). A `Scan` describes an op and a case one set of its arguments:

    scan = SCANS["linear_attention"]  # of lnssm_jax.ops.cases
    case = scan.checks[0].case  # Case(T=37, decay=None, ...)
    inputs = scan.inputs(case)  # {"q": float64 [B, T, H, K], ..., "state.kv": [B, H, K, V]}
    out, state = scan(case, inputs, implementation="chunked")  # calls ops.linear_attention

    args, kwargs = scan.bind(case, inputs)  # the arguments of that call
    scan.over_time(case, inputs)  # names of the inputs with a time axis: ["q", "k", "v"]
    scan.narrow  # names of those that may be bfloat16: ("q", "k", "v")
    scan.compared(out, state)  # as a tree of real arrays, for errors
    scan.program_of(case)  # the case that stands for all of its compiled program

A check is a case with an implementation and a dtype; tests/ops/contract.py runs it.
"""

import dataclasses
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
  def T(self) -> int:
    """Tokens of the sequence."""
    ...

  @property
  def strength(self) -> str:
    """Of the decay: "weak", "ordinary", "extreme", "lasting" or "uneven"."""
    ...

  @property
  def segments(self) -> bool:
    """Whether rows hold several documents."""
    ...

  @property
  def chunk(self) -> int | None:
    """Tokens per chunk, or None for the default."""
    ...


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
  # Fields of a case on which the numbers of its inputs depend, and nothing else: cases that differ
  # in them alone run the same compiled program.
  number_fields: tuple[str, ...] = ("strength",)
  implementations: tuple[str, ...] = ("chunked", "associative", "reference")  # as preferred
  # What is compared of an output and a state, as real arrays.
  compared: Callable[[Any, Any], Any] = lambda out, state: {"out": out, "state": state}
  # An infinity in one packed document does not reach the others, whatever the arguments.
  isolates_documents: bool = True

  def inputs(self, case: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """The inputs of a case, in float64."""
    return self.draw(case, np.random.default_rng(seed))

  def program_of(self, case: Any) -> Any:
    """The case that stands for all that run the same compiled program."""
    names = set(self.number_fields) & {field.name for field in dataclasses.fields(case)}
    numbers = {name: "ordinary" for name in names if getattr(case, name) is not None}
    return dataclasses.replace(case, **numbers)

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
  """Ids that change often, at the last token too, skip numbers and come back to an earlier one.

  In row 1 of more than two chunks of the kernels they change only twice, inside the second chunk
  and the third: documents pass boundaries of chunks, and what a state should have lost shows.
  """
  changes = np.random.default_rng(1).random((B, length)) < 0.15
  changes[0, -1] = True
  if length > 130:
    changes[1] = np.isin(np.arange(length), (47 * length // 100, 9 * length // 10))
  return jnp.asarray(3 * (np.cumsum(changes, axis=1) % 2), jnp.int32)


def log_decay(rng: np.random.Generator, shape: tuple[int, ...], strength: str) -> np.ndarray:
  """Log decays: weak (near 0), ordinary, or extreme: from -20 per token to 0, ends included.

  Or "lasting", the same 1e-6 everywhere: a decay rounded to float32 is then wrong for every token.
  Or "uneven": weak in the first 64 channels, which are the last axis, and -3 to -6 in the others.
  """
  if strength == "uneven":
    decay = log_decay(rng, shape, "weak")
    decay[..., 64:] = -3 - 3 * rng.random(decay[..., 64:].shape)
    return decay
  if strength == "lasting":
    return np.full(shape, -1e-6)
  if strength in ("weak", "ordinary"):
    return -np.exp(rng.normal(size=shape) - (7 if strength == "weak" else 1))
  if strength != "extreme":
    raise ValueError(f"strength={strength!r} is unknown")
  decay = -20 * rng.random(shape) ** 2
  decay.flat[0], decay.flat[-1] = -20, 0
  return decay

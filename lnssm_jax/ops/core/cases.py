"""Cases of an op, for tests and benchmarks, and how its arguments are drawn.

The same descriptions serve the tests (tests/ops/cases has what they hold an op to), the table of
errors (`benchmarks.numerics`) and the timings (`benchmarks.scans`). A `Scan` describes an op and a
case one set of its arguments:

    scan = SCANS["linear_attention"]  # of lnssm_jax.ops.cases
    case = scan.measured(1024, "weak")  # Case(T=1024, decay="HK", ...)
    inputs = scan.inputs(case)  # {"q": float64 [B, T, H, K], ..., "state.kv": [B, H, K, V]}
    out, state = scan(case, inputs, implementation="chunked")  # calls ops.linear_attention

    args, kwargs = scan.bind(case, inputs)  # the arguments of that call
    scan.narrow  # names of the inputs that may be bfloat16: ("q", "k", "v")
    scan.compared(out, state)  # as a tree of real arrays, for errors
"""

import typing
from collections.abc import Callable, Mapping
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


@dataclass(frozen=True, kw_only=True)
class Scan:
  """A scan, its arguments, and what is measured of it.

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
  # A case of a length and a strength of the decay, small otherwise and with the default chunk, for
  # the table of errors.
  measured: Callable[[int, str], Any]
  measured_too: Mapping[str, Callable[[int, str], Any]] = field(default_factory=dict)  # by a label
  strengths: tuple[str, ...] = ("weak", "ordinary", "extreme", "lasting")  # those of `measured`
  # Where the reference needs the square of the length: beyond which it is not run, by label.
  longest_reference: Mapping[str, int] = field(default_factory=dict)
  # What is compared of an output and a state, as real arrays.
  compared: Callable[[Any, Any], Any] = lambda out, state: {"out": out, "state": state}

  def inputs(self, case: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """The inputs of a case, in float64."""
    return self.draw(case, np.random.default_rng(seed))

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

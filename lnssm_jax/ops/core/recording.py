"""The calls of ops that a piece of code makes: their arguments, and what runs them."""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class OpCall(NamedTuple):
  """One call of a public op."""

  op: str  # its name
  arguments: dict[str, Any]  # by name, as given; those that were not given have their defaults


# (call, run) -> the op's (out, state), which `run()` computes.
type Observer = Callable[[OpCall, Callable[[], Any]], Any]
_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar(
  "observer", default=None
)


@contextlib.contextmanager
def observing(observer: Observer | None) -> Iterator[None]:
  """Within the block, `observer` gets the calls of public ops and gives their results.

  An op that calls others is one call. None ends what a surrounding block does.
  """
  token = _observer.set(observer)
  try:
    yield
  finally:
    _observer.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[list[OpCall]]:
  """Collects the calls of public ops within the block, in their order.

      with ops.recording() as calls:
        mixer(x)
      q = calls[0].arguments["q"]

  The results are those without it. An op that calls others counts once. Under a transformation of
  JAX the arguments are tracers: use them inside the same function. A call inside a loop or
  `jax.checkpoint` within the block belongs to another trace, and its arguments are of no use.
  """
  calls: list[OpCall] = []

  def keep(call: OpCall, run: Callable[[], Any]) -> Any:
    calls.append(call)
    return run()

  with observing(keep):
    yield calls


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
  """Makes the calls of a public op go through the surrounding `observing`, if there is one."""
  signature = inspect.signature(function)

  @functools.wraps(function)
  def called(*args: Any, **kwargs: Any) -> Any:
    observer = _observer.get()
    if observer is None:
      return function(*args, **kwargs)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    call = OpCall(function.__name__, dict(bound.arguments))
    with observing(None):
      return observer(call, functools.partial(function, *args, **kwargs))

  return called


class Choice(NamedTuple):
  """Calls of an op for which a form in XLA was chosen, and why no kernel was."""

  op: str
  reason: str


_in_xla: contextvars.ContextVar[dict[Choice, None] | None] = contextvars.ContextVar(
  "in_xla", default=None
)


@contextlib.contextmanager
def choices_of_xla() -> Iterator[dict[Choice, None]]:
  """Collects, within the block, the ops that run in XLA's forms, also inside of other ops.

  As the keys of a dictionary, each once, in their order. A program that is traced in the block
  chooses there; one that JAX has traced before does not choose again.
  """
  found: dict[Choice, None] = {}
  token = _in_xla.set(found)
  try:
    yield found
  finally:
    _in_xla.reset(token)


def chose_xla(op: str, reason: str | None) -> None:
  """Notes a choice for the surrounding `choices_of_xla`; a reason of None is that of a kernel."""
  found = _in_xla.get()
  if found is not None and reason is not None:
    found[Choice(op, reason.rstrip("."))] = None


def lines_of(choices: Iterable[Choice]) -> list[str]:
  """Ops that share a reason in one line: "attention runs in XLA's form: REASON"."""
  by_reason: dict[str, list[str]] = {}
  for op, reason in choices:
    by_reason.setdefault(reason, []).append(op)
  return [
    f"{', '.join(ops)} {'run' if len(ops) > 1 else 'runs'} in XLA's form: {reason}"
    for reason, ops in by_reason.items()
  ]

"""Which implementation of a scan runs: one rule for all of them.

A scan registers its implementations in order of preference. `implementation=None` takes the first
one that can run the arguments; a name runs that one or raises, and the error says which argument
stands in the way. No global flag takes part in the choice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


def _no_obstacle(*args, **kwargs) -> str | None:
  del args, kwargs
  return None


class Implementation(NamedTuple):
  """One way to compute a scan."""

  name: str
  run: Callable[..., Any]
  # Called like `run`: why the arguments cannot run, or None. By default they always can.
  obstacle: Callable[..., str | None] = _no_obstacle


_IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {}
_ARGUMENT_CHECKS: dict[str, Callable[..., tuple[tuple, dict]]] = {}


def register(scan: str, check: Callable[..., tuple[tuple, dict]], *implementations: Implementation):
  """Registers the implementations of `scan`, the preferred one first.

  `check` takes the public function's arguments and returns the positional and keyword arguments of
  the implementations.
  """
  _IMPLEMENTATIONS[scan] = implementations
  _ARGUMENT_CHECKS[scan] = check


def choose(scan: str, requested: str | None, args: tuple, kwargs: dict) -> Implementation:
  """The implementation of `scan` to run on checked arguments.

  Raises:
    ValueError: `requested` is not a name of an implementation of this scan.
    NotImplementedError: `requested` cannot run these arguments; the message says why.
  """
  implementations = _IMPLEMENTATIONS[scan]
  if requested is None:
    for candidate in implementations:
      if candidate.obstacle(*args, **kwargs) is None:
        return candidate
    raise NotImplementedError(f"{scan}: no implementation can run these arguments.")
  for candidate in implementations:
    if candidate.name == requested:
      obstacle = candidate.obstacle(*args, **kwargs)
      if obstacle is not None:
        raise NotImplementedError(f"{scan}: implementation={requested!r} cannot run: {obstacle}")
      return candidate
  names = ", ".join(repr(candidate.name) for candidate in implementations)
  raise ValueError(f"{scan}: implementation={requested!r} is unknown; use one of {names}, or None.")


def supported(scan: Callable[..., Any], *args, **kwargs) -> list[str]:
  """Names of the implementations of `scan` that can run these arguments, the preferred one first.

      ops.supported(ops.linear_attention, q, k, v, log_decay=log_decay)

  Raises:
    ValueError: the arguments themselves are wrong, as `scan` would raise it.
  """
  kwargs.pop("implementation", None)
  checked_args, checked_kwargs = _ARGUMENT_CHECKS[scan.__name__](*args, **kwargs)
  return [
    candidate.name
    for candidate in _IMPLEMENTATIONS[scan.__name__]
    if candidate.obstacle(*checked_args, **checked_kwargs) is None
  ]

"""Which implementation of a scan runs: one rule for all of them.

A scan registers its implementations in order of preference. `implementation=None` takes the first
one that can run the arguments and is worthwhile for them; a name runs that one or raises, and the
error says which argument stands in the way. No global flag takes part in the choice.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from lnssm_jax.ops import per_device


def _no_obstacle(*args, **kwargs) -> str | None:
  del args, kwargs
  return None


def _always(*args, **kwargs) -> bool:
  del args, kwargs
  return True


def _by_name_only(*args, **kwargs) -> bool:
  del args, kwargs
  return False


class Implementation(NamedTuple):
  """One way to compute a scan."""

  name: str
  run: Callable[..., Any]
  # Called like `run`: why the arguments cannot run, or None. By default they always can.
  obstacle: Callable[..., str | None] = _no_obstacle
  # Called like `run`: whether `implementation=None` may take it, where nothing stands in the way.
  worthwhile: Callable[..., bool] = _always


_IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {}
_ARGUMENT_CHECKS: dict[str, Callable[..., tuple[tuple, dict]]] = {}


def register(scan: str, check: Callable[..., tuple[tuple, dict]], *implementations: Implementation):
  """Registers the implementations of `scan`, the preferred one first.

  `check` takes the public function's arguments and returns the positional and keyword arguments of
  the implementations.
  """
  _IMPLEMENTATIONS[scan] = implementations
  _ARGUMENT_CHECKS[scan] = check


def kernels(module: str, layout: per_device.Layout) -> tuple[Implementation, Implementation]:
  """The implementations "pallas", on a Hopper GPU, and "pallas_interpret", by name only.

  A kernel is a program for one device. Where a program for several knows its mesh, each runs it on
  its part (`per_device`). Else the compiler would gather all arguments: then `None` takes kernels
  only inside a `shard_map` that maps over every axis of the mesh.

  Args:
    module: the name of the module that has `run`, `interpreted`, `obstacle` (on any device) and
      `worthwhile`, all called alike. It is imported when one of them is first needed, because
      importing what a kernel is written with takes longer than importing all the rest.
    layout: the axes of what they take and return.
  """
  load = functools.partial(importlib.import_module, module)

  def division(args):
    return None if _on_one_device(args[0]) else per_device.division(layout, args)

  def run(name, *args, **kwargs):
    scan, divided = functools.partial(getattr(load(), name), **kwargs), division(args)
    return scan(*args) if divided is None else divided.run(scan, args)

  def obstacle(*args, **kwargs):
    ask, divided = functools.partial(load().obstacle, **kwargs), division(args)
    return ask(*args) if divided is None else divided.ask(ask, args)

  def worthwhile(*args, **kwargs):
    if _on_one_device(args[0]):
      return load().worthwhile(*args, **kwargs)
    divided = division(args)
    return divided is not None and divided.ask(functools.partial(load().worthwhile, **kwargs), args)

  compiled = Implementation(
    "pallas",
    functools.partial(run, "run"),
    lambda *args, **kwargs: hopper_obstacle() or obstacle(*args, **kwargs),
    worthwhile,
  )
  interpreted = Implementation(
    "pallas_interpret", functools.partial(run, "interpreted"), obstacle, _by_name_only
  )
  return compiled, interpreted


def hopper_obstacle() -> str | None:
  """Why the default device cannot run kernels for Hopper, or None."""
  device = _default_device()
  if device.platform != "gpu":
    return f"the default device is a {device.platform}, and the kernels need a Hopper GPU"
  capability = str(getattr(device, "compute_capability", "unknown"))
  if not capability.startswith("9."):
    return f"the GPU has compute capability {capability}, and the kernels need 9.0 (Hopper)"
  return None


def _on_one_device(x: jax.Array) -> bool:
  """Whether x lies on one device: there is only one, or `shard_map` maps over all of the mesh."""
  mapped = bool(jax.typeof(x).manual_axis_type.varying)
  alone = math.prod(per_device.unmapped_axes().values()) == 1
  return alone and (mapped or jax.device_count() == 1)


def _default_device() -> jax.Device:
  device = jax.config.jax_default_device  # a device, the name of a platform, or None
  return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def choose(scan: str, requested: str | None, args: tuple, kwargs: dict) -> Implementation:
  """The implementation of `scan` to run on checked arguments.

  Raises:
    ValueError: `requested` is not a name of an implementation of this scan.
    NotImplementedError: `requested` cannot run these arguments; the message says why.
  """
  implementations = _IMPLEMENTATIONS[scan]
  if requested is None:
    for candidate in implementations:
      # In this order: an obstacle spares importing what knows whether it is worthwhile.
      if candidate.obstacle(*args, **kwargs) is None and candidate.worthwhile(*args, **kwargs):
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


def checked(scan: Callable[..., Any], *args, **kwargs) -> tuple[tuple, dict]:
  """The arguments of `scan` in the form that its implementations take.

  Raises:
    ValueError: the arguments are wrong, as `scan` would raise it.
  """
  return _ARGUMENT_CHECKS[scan.__name__](*args, **kwargs)


def supported(scan: Callable[..., Any], *args, **kwargs) -> list[str]:
  """Names of the implementations of `scan` that can run these arguments, the preferred one first.

      ops.supported(ops.linear_attention, q, k, v, log_decay=log_decay)

  The first is the one that `implementation=None` takes; those that it would pass over are last.

  Raises:
    ValueError: the arguments themselves are wrong, as `scan` would raise it.
  """
  kwargs.pop("implementation", None)
  args, kwargs = checked(scan, *args, **kwargs)
  able = [x for x in _IMPLEMENTATIONS[scan.__name__] if x.obstacle(*args, **kwargs) is None]
  able.sort(key=lambda candidate: not candidate.worthwhile(*args, **kwargs))  # stable
  return [candidate.name for candidate in able]

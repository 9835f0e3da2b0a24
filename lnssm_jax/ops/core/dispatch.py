"""Which implementation of an op runs: one rule for all of them.

An op's `api.py` has its implementations by name, the preferred one first:

    IMPLEMENTATIONS = kernels.with_forms(chunked=chunked, reference=reference)

`implementation=None` takes the first that supports the arguments and is preferred for them; a name
runs that one or raises, and the error says which argument is not supported. There are no global
flags.
"""

import contextlib
import functools
import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax

from lnssm_jax.ops.core import spmd
from lnssm_jax.ops.core.explicit_axes import under_auto_axes
from lnssm_jax.ops.core.recording import chose_xla, observing, recorded
from lnssm_jax.ops.core.sequence_parallel import place
from lnssm_jax.ops.core.states import unknown
from lnssm_jax.ops.core.symbolic import naming_length
from pallas_kernels import MADE_BY_KERNELS as MADE_BY_KERNELS  # for rematerialization policies
from pallas_kernels.core import device


def _always_supported(inputs: Any, options: Any) -> str | None:
  del inputs, options


def _always_preferred(inputs: Any, options: Any) -> bool:
  del inputs, options
  return True


def _by_name_only(inputs: Any, options: Any) -> bool:
  del inputs, options
  return False


class Form(NamedTuple):
  """One way to compute an op. All three take the op's checked `Inputs` and its `Options`."""

  run: Callable[[Any, Any], Any]  # -> (out, state), or what else the op returns
  # Why these arguments cannot run, or None.
  unsupported: Callable[[Any, Any], str | None] = _always_supported
  # Whether `implementation=None` may take it for supported arguments.
  preferred: Callable[[Any, Any], bool] = _always_preferred


class Op[**P, Result, **S, State](Protocol):
  """A public op: a function, and `init_state`, which makes its state before the first token."""

  __name__: str

  def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result: ...

  @property
  def init_state(self) -> Callable[S, State]:
    """Makes the state before the first token."""
    ...


class Call(NamedTuple):
  """A call of an op with checked arguments."""

  op: str
  forms: Mapping[str, Form]
  inputs: Any
  options: Any

  def choose(self, implementation: str | None = None) -> str:
    """The name of the implementation to run.

    Raises:
      ValueError: `implementation` is not a name of an implementation of this op.
      NotImplementedError: it does not support these arguments; the message says why.
    """
    # In this order: an unsupported one spares importing what knows whether it is preferred.
    able = (x for x in self.forms if self.unsupported(x) is None and self.preferred(x))
    if implementation is None:
      for name in able:
        return name
      raise NotImplementedError(f"{self.op}: no implementation supports these arguments.")
    if implementation not in self.forms:
      names = ", ".join(map(repr, self.forms))
      raise ValueError(
        f"{self.op}: implementation={implementation!r} is unknown; use one of {names}, or None."
      )
    reason = self.unsupported(implementation)
    if reason is not None:
      name = next(able, None)
      fix = f"; leave it out, and {name!r} runs" if name else ""
      raise NotImplementedError(
        f"{self.op}: implementation={implementation!r} cannot run: {reason.rstrip('.')}{fix}."
      )
    return implementation

  def unsupported(self, name: str) -> str | None:
    """Why an implementation cannot run these arguments, or None."""
    return self.forms[name].unsupported(self.inputs, self.options)

  def preferred(self, name: str) -> bool:
    """Whether `implementation=None` may take an implementation that supports these arguments."""
    return self.forms[name].preferred(self.inputs, self.options)

  def reason_for_xla(self, name: str, implementation: str | None) -> str | None:
    """Why XLA's form `name` was chosen and no kernel; None if it is a kernel."""
    if name not in _IN_XLA:
      return None
    if implementation is not None:
      return f"implementation={implementation!r} is given"
    if "pallas" not in self.forms:
      return "it has no kernels"
    return (
      self.unsupported("pallas") or "its kernels are not preferred for these sizes or this mesh"
    )


_IN_XLA = ("chunked", "associative", "reference")
_OPS: dict[str, Callable[..., Any]] = {}
_FACTS: dict[str, "Facts"] = {}
_CHECK_ONLY: Any = object()  # as `implementation=`: `run` returns the checked call


_UNSTATED: Any = object()


class Facts(NamedTuple):
  """Facts that others need to know of an op."""

  log_decay: Callable[[dict[str, Any]], Any] | None
  query_key: tuple[str, str] | None
  recurrence: Callable[[Any, Any], dict[str, Any] | str] | str | None
  decodes: bool


def op[**P, Result, **S, State](
  init_state: Callable[S, State],
  *,
  log_decay: Callable[[dict[str, Any]], Any] | None = _UNSTATED,
  query_key: tuple[str, str] | None = _UNSTATED,
  recurrence: Callable[[Any, Any], dict[str, Any] | str] | str | None = _UNSTATED,
  decodes: bool = _UNSTATED,
) -> Callable[[Callable[P, Result]], Op[P, Result, S, State]]:
  """Makes a function, which ends in a call of `run`, a public op, and states what it is.

  Analysis and frameworks ask for the facts (`fact`); one that is not stated raises there.

  Args:
    init_state: makes the state before the first token.
    log_decay: makes the log decays of a call of its arguments by name, [H, K] if they are constant,
      else [B, T, H, K], as `Mixer.decay` gives them; or None where a call has none. They are the
      numbers that the op receives, in float32 at least. None: the op has no decay.
    query_key: the arguments that are queries and keys of a token; None: there are none.
    recurrence: makes the streams of `core.recurrence.Recurrence` from the checked inputs and
      options of a call, or says why it is no recurrence; a text: why no call is one. None: the op
      is part of what surrounds recurrences, as a short convolution is.
    decodes: whether one of its kernels is for a single token.
  """

  def decorate(function: Any) -> Any:
    public: Any = recorded(under_auto_axes()(function))
    public.init_state = init_state
    _OPS[public.__name__] = public
    _FACTS[public.__name__] = Facts(log_decay, query_key, recurrence, decodes)
    return public

  return decorate


def names() -> list[str]:
  """The names of all public ops, in the order of the alphabet."""
  return sorted(_OPS)


def fact(op: str, name: str) -> Any:
  """One of the `Facts` of a public op.

  Raises:
    ValueError: its decorator does not state it.
  """
  if (stated := getattr(_FACTS[op], name)) is _UNSTATED:
    raise ValueError(
      f"{op}: this op does not state its {name}; give {name}=... to its decorator, "
      "@dispatch.op(init_state, ...), or None if it has none."
    )
  return stated


def run(
  op: str,
  forms: Mapping[str, Form],
  inputs: Any,
  options: Any,
  *,
  implementation: str | None,
  axis_name: str | None = None,
  sharded: Callable[..., tuple[Any, Any]] | None = None,
  finish: Callable[[Any], Any] = lambda results: results,
) -> Any:
  """Runs a checked call, on the whole sequence or on one shard of it.

  Args:
    finish: makes the op's results from those of an implementation.
    sharded: (run, inputs, options, axis_name) -> (out, state) on one shard; `run` is this function
      for other inputs on the shard alone. `inputs.state` is that of the whole sequence.

  Raises:
    ValueError, NotImplementedError: as `Call.choose`; ValueError: `axis_name` is not an axis that
      a surrounding `shard_map` maps over.
  """
  if implementation is _CHECK_ONLY:
    return Call(op, forms, spmd.vary_alike(inputs), options)

  def local(inputs: Any, options: Any = options) -> tuple[Any, Any]:
    inputs = spmd.vary_alike(inputs)
    call = Call(op, forms, inputs, options)
    name = call.choose(implementation)
    chose_xla(op, call.reason_for_xla(name, implementation))
    with jax.named_scope(op), _naming_forward_mode(op, name), naming_length(op, inputs):
      return forms[name].run(inputs, options)

  if axis_name is None:
    return finish(local(inputs))
  place(axis_name)
  if sharded is None:
    raise NotImplementedError(f"{op}: axis_name={axis_name!r}; this op needs the whole sequence.")
  return finish(sharded(local, inputs, options, axis_name))


# In JAX's messages; the second is of a gradient of a forward-mode derivative.
_FORWARD_MODE = ("forward-mode", "'custom_lin'")


@contextlib.contextmanager
def _naming_forward_mode(op: str, name: str) -> Iterator[None]:
  """Says which implementation has forward-mode derivatives where JAX finds one without.

  JAX finds it here where values are known. A derivative of `jax.jit`, and what `jax.linearize`
  returns, are of the finished program, without a call of this op, and the message is JAX's.
  """
  try:
    yield
  except (TypeError, NotImplementedError) as error:
    if not any(sign in str(error) for sign in _FORWARD_MODE):
      raise
    raise TypeError(
      f"{op}: implementation={name!r} has a backward pass of its own and no forward-mode derivative"
      " (jax.jvp, jax.jacfwd, jax.hessian); use implementation='reference', or jax.jacrev."
    ) from error


def check(op: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Call:
  """The checked call of a public op, given itself or by name.

  Raises:
    ValueError: the arguments are wrong, as the op itself would raise it.
  """
  if isinstance(op, str):
    if op not in _OPS:
      raise ValueError(f"supported: no op is named {op!r}; the ops are {', '.join(sorted(_OPS))}.")
    op = _OPS[op]
  with observing(None):
    return op(*args, **kwargs | {"implementation": _CHECK_ONLY})


def supported(op: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> list[str]:
  """Names of the implementations of `op` that support these arguments, the preferred one first.

      ops.supported("linear_attention", q, k, v, log_decay=log_decay)

  The first is the one that `implementation=None` takes; those that it would pass over are last.

  Args:
    op: a public op, or its name; then its own arguments.

  Raises:
    ValueError: the arguments themselves are wrong, as the op would raise it.
  """
  call = check(op, *args, **kwargs)
  able = [name for name in call.forms if call.unsupported(name) is None]
  return sorted(able, key=lambda name: not call.preferred(name))  # stable


def _from_unknown_state(run, inputs, options):
  """`run` in XLA, which must not know that a state is zero, see `unknown`."""
  state = getattr(inputs, "state", None)
  return run(inputs if state is None else inputs._replace(state=unknown(state)), options)


class Kernels:
  """The implementations "pallas", on a GPU that has kernels, and by name only "pallas_interpret".

  Where those for GPUs since Ampere are others than Hopper's (`apart`), "pallas" is Hopper's own on
  Hopper and they are "pallas" on any other; by name, "pallas_ampere" and "pallas_ampere_interpret",
  they run on Hopper, too.

  A kernel is a program for one device. In a program for several whose mesh is known, each device
  runs it on its shard (`spmd`). Else the compiler would gather all arguments: then `None` takes
  kernels only inside a `shard_map` that maps over every axis of the mesh.

  Args:
    module: the name of the module that has `run`, `unsupported` (on any device) and `preferred`,
      all called alike, and `run` also with `interpret`. It is imported when one of them is first
      needed: importing what a kernel is written with takes longer than importing all the rest.
    results: the axes of the results, those of the output and of the state's arrays in most ops, as
      in `Inputs.AXES`.
    apart: whether the kernels for Ampere are others; then `run` has an argument `architecture`, and
      the module an `unsupported_ampere` where those support less.
  """

  def __init__(self, module: str, results: tuple[str, ...], *, apart: bool = False):
    self._module, self._results, self._apart = module, results, apart

  def with_forms(self, **forms: Callable[[Any, Any], Any]) -> dict[str, Form]:
    """All implementations of an op, as preferred: these are between those of the kernels."""
    named = {name: Form(functools.partial(_from_unknown_state, run)) for name, run in forms.items()}
    every = {"pallas": self._compiled(self._preferred), **named}
    every["pallas_interpret"] = self._interpreted()
    if self._apart:
      how = {"architecture": device.AMPERE}
      every["pallas_ampere"] = self._compiled(_by_name_only, **how)
      every["pallas_ampere_interpret"] = self._interpreted(**how)
    return every

  def _compiled(self, preferred, **how):
    def unsupported(inputs, options):
      runs = how.get("architecture", device.current().architecture)
      return device.unsupported(device.EVERY) or self._unsupported(runs, inputs, options)

    return Form(functools.partial(self._run, how), unsupported, preferred)

  def _interpreted(self, **how):
    def unsupported(inputs, options):
      runs = how.get("architecture")
      return interpreter_unsupported() or self._unsupported(runs, inputs, options)

    def run(inputs, options):
      return self._run(how | {"interpret": interpreter()}, inputs, options)

    return Form(run, unsupported, _by_name_only)

  def _kernels(self) -> Any:
    return importlib.import_module(self._module)

  def _division(self, inputs):
    if _on_one_device(inputs[0]):
      return None
    division = spmd.division(inputs.AXES.values(), self._results, inputs)
    returns_state = len(self._results) > 1
    if division is not None and returns_state and spmd.shares_state(inputs, division):
      return None
    return division

  def _run(self, how, inputs, options):
    run = functools.partial(self._kernels().run, options=options, **how)
    division = self._division(inputs)
    return run(inputs) if division is None else division.run(run, inputs)

  def _unsupported(self, architecture, inputs, options):
    kernels = self._kernels()
    ask = kernels.unsupported
    if self._apart and architecture == device.AMPERE:
      ask = getattr(kernels, "unsupported_ampere", ask)
    ask = functools.partial(ask, options=options)
    division = self._division(inputs)
    return ask(inputs) if division is None else division.ask(ask, inputs)

  def _preferred(self, inputs, options):
    ask = functools.partial(self._kernels().preferred, options=options)
    if _on_one_device(inputs[0]):
      return ask(inputs)
    division = self._division(inputs)
    return division is not None and division.ask(ask, inputs)


@functools.cache
def interpreter() -> Any:
  """How kernels run on a CPU: with a check for races."""
  from jax.experimental.pallas import mosaic_gpu as plgpu

  return plgpu.InterpretGPUParams(detect_races=True)


# Interpreted warpgroups (up to three per CTA, two CTAs in a cluster) block threads of XLA's pool in
# callbacks, in which they start programs and wait for threads of the same pool.
_INTERPRETER_THREADS = 8


def interpreter_unsupported() -> str | None:
  """Why this process cannot interpret kernels, or None."""
  cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
  threads = int(os.environ.get("NPROC") or cpus)  # as XLA's client for CPUs counts them
  if threads >= _INTERPRETER_THREADS:
    return None
  return (
    f"XLA has {threads} threads here, and interpreted kernels may wait forever with fewer than "
    f"{_INTERPRETER_THREADS}; set NPROC=16 in the environment before Python starts"
  )


def _on_one_device(x: jax.Array) -> bool:
  """Whether x is on one device: there is only one, or `shard_map` maps over all of the mesh."""
  mapped = bool(jax.typeof(x).manual_axis_type.varying)
  alone = math.prod(spmd.unmapped_axes().values()) == 1
  return alone and (mapped or jax.device_count() == 1)

"""Single operations outside of compiled programs, by NumPy: the first time XLA compiles each.

To compile one takes 25 ms, and tests call thousands, most of them once. Those here only move
numbers or round once, so that NumPy has the same bits; those that are called often are compiled.
Random numbers are drawn by a program for many shapes: each depends on its place in the array alone.
"""

import functools
import inspect
import math
import threading
import weakref
from unittest import mock

import jax
import numpy as np

# Programs that jax makes of an operation, or of a function of jax.numpy. Those of tests have other
# names and are compiled, also where they are one of these operations.
NAMES = {
  *("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "transpose", "slice"),
  *("dynamic_slice", "dynamic_update_slice", "concatenate", "iota", "select_n", "rev", "split"),
  *("add", "subtract", "sub", "multiply", "mul", "true_divide", "div", "negative", "neg", "abs"),
  *("maximum", "max", "minimum", "min", "sqrt", "square", "clip", "_where", "where", "_moveaxis"),
  *("equal", "eq", "not_equal", "ne", "less", "lt", "less_equal", "le", "greater", "gt"),
  *("greater_equal", "ge", "logical_not", "logical_and", "logical_or", "bitwise_and", "not"),
  *("_squeeze", "_broadcast_to", "_reduce_max", "_reduce_min", "_reduce_any", "_reduce_all"),
  *("reduce_max", "reduce_min", "reduce_or", "reduce_and", "isfinite", "is_finite", "tile"),
  *("stage", "real", "imag", "_arange", "_eye", "expand_dims", "swapaxes", "stack", "copy"),
  *("_reshape", "full", "absolute"),
}
CALLS = 100  # before a program is compiled, which takes as long
LARGEST = 100_000  # numbers of an array


def _convert(x, new_dtype, weak_type, sharding):
  return x.astype(new_dtype)


def _broadcast(x, shape, broadcast_dimensions, sharding):
  sizes = [1] * len(shape)
  for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
    sizes[axis] = size
  return np.broadcast_to(x.reshape(sizes), shape)


def _slice(x, start_indices, limit_indices, strides):
  strides = strides or [1] * x.ndim
  return x[tuple(map(slice, start_indices, limit_indices, strides))]


def _window(x, sizes, starts):
  """Where it begins it may be moved, so that it lies inside."""
  starts = [int(np.clip(s, 0, n - size)) for s, n, size in zip(starts, x.shape, sizes, strict=True)]
  return tuple(slice(s, s + size) for s, size in zip(starts, sizes, strict=True))


def _dynamic_update_slice(x, update, *starts):
  x = x.copy()
  x[_window(x, update.shape, starts)] = update
  return x


def _iota(dtype, shape, dimension, sharding):
  return _broadcast(np.arange(shape[dimension]).astype(dtype), shape, [dimension], None)


def _select(which, *cases):
  return np.where(which, cases[1], cases[0])


def _split(x, sizes, axis):
  return np.split(x, np.cumsum(sizes)[:-1], axis)


def _reduce(ufunc):
  return lambda x, axes, **_: ufunc.reduce(x, axis=axes)


def _elementwise(ufunc):
  return lambda *xs, **_: ufunc(*xs)


FORMS = {
  "convert_element_type": _convert,
  "broadcast_in_dim": _broadcast,
  "reshape": lambda x, new_sizes, dimensions, sharding: x.reshape(new_sizes),
  "squeeze": lambda x, dimensions: np.squeeze(x, tuple(dimensions)),
  "transpose": lambda x, permutation: np.transpose(x, permutation),
  "slice": _slice,
  "dynamic_slice": lambda x, *starts, slice_sizes: x[_window(x, slice_sizes, starts)],
  "dynamic_update_slice": _dynamic_update_slice,
  "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
  "stack": lambda *xs, axis: np.stack(xs, axis),
  "tile": lambda x, reps: np.tile(x, reps),
  "iota": _iota,
  "select_n": _select,
  "split": _split,
  "rev": lambda x, dimensions: np.flip(x, dimensions),
  "copy": lambda x: x,
  "real": np.real,
  "imag": np.imag,
  "reduce_max": _reduce(np.maximum),
  "reduce_min": _reduce(np.minimum),
  "reduce_or": _reduce(np.logical_or),
  "reduce_and": _reduce(np.logical_and),
}
UFUNCS = {
  *(("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("neg", np.negative)),
  *(("abs", np.abs), ("max", np.maximum), ("min", np.minimum), ("is_finite", np.isfinite)),
  *(("eq", np.equal), ("ne", np.not_equal), ("lt", np.less), ("le", np.less_equal)),
  *(("gt", np.greater), ("ge", np.greater_equal), ("and", np.bitwise_and), ("or", np.bitwise_or)),
  *(("not", np.bitwise_not), ("div", np.divide), ("sqrt", np.sqrt), ("square", np.square)),
}
FORMS |= {name: _elementwise(ufunc) for name, ufunc in UFUNCS}
ROUNDED_TWICE = {"div", "sqrt", "square"}  # in float16 and bfloat16, and integers divide otherwise
BY_PARTS = {"mul", "div", "abs", "sqrt", "square", "max", "min"}  # of complex numbers


def _known(jaxpr) -> bool:
  """Whether NumPy computes the same numbers."""
  ends = [x.aval for x in (*jaxpr.invars, *jaxpr.outvars)]
  if jaxpr.effects or jaxpr.constvars or not all(map(_plain, ends)):
    return False
  return all(map(_known_operation, jaxpr.eqns))


def _known_operation(eqn) -> bool:
  name, types = eqn.primitive.name, [x.aval for x in (*eqn.invars, *eqn.outvars)]
  if name in ("jit", "pjit"):
    return _known(eqn.params["jaxpr"])
  if name not in FORMS or not all(map(_plain, types)):
    return False
  first = types[0]
  return (
    (name not in ROUNDED_TWICE or {x.dtype for x in types} <= {np.dtype("f4"), np.dtype("f8")})
    and (name not in BY_PARTS or all(x.dtype.kind != "c" for x in types))
    and (name != "convert_element_type" or _converts(first.dtype, types[1].dtype))
    and (name != "select_n" or (first.dtype == bool and len(types) == 4))
    and (name not in ("reduce_max", "reduce_min") or first.size > 0)
  )


def _plain(x) -> bool:
  """Whether it is an array, and small, of numbers that NumPy has."""
  if not isinstance(getattr(x, "dtype", None), np.dtype) or x.size > LARGEST:
    return False
  return x.dtype.kind in "biufc" or x.dtype.name == "bfloat16"


def _converts(old, new) -> bool:
  """Not from floats to integers, which is undefined outside their range, and rounded once."""
  from_float = old.kind == "f" or old.name == "bfloat16"
  if "c" in (old.kind, new.kind) or (from_float and new.kind in "iu"):
    return False
  return not (old.itemsize > 4 and (new.itemsize < 4 and new.kind != "b"))


def _run(jaxpr, args):
  values = dict(zip(jaxpr.invars, args, strict=True))
  value = lambda x: np.asarray(x.val, x.aval.dtype) if hasattr(x, "val") else values[x]
  for eqn in jaxpr.eqns:
    given = map(value, eqn.invars)
    if eqn.primitive.name in ("jit", "pjit"):
      results = _run(eqn.params["jaxpr"], given)
    else:
      results = FORMS[eqn.primitive.name](*given, **eqn.params)
      results = results if eqn.primitive.multiple_results else [results]
    for x, result in zip(eqn.outvars, results, strict=True):
      values[x] = np.asarray(result, x.aval.dtype)
  return list(map(value, jaxpr.outvars))


class Calls(threading.local):
  """Calls of each program so far; those that NumPy does not compute have enough."""

  def __init__(self):
    self.of = weakref.WeakKeyDictionary()


@functools.cache
def install() -> bool:
  """For the rest of this process; False where jax has no such place."""
  try:
    from jax._src import config, core, literals, pjit
    from jax._src.array import ArrayImpl
    from jax._src.interpreters import pxla
    from jax._src.lib import _jax
    from jax._src.random import core as random
    from jax._src.sharding_impls import UnspecifiedValue

    compiled = pjit._pjit_call_impl_python
    draws = {name: getattr(random, name) for name in ("_normal", "_uniform", "_truncated_normal")}
  except (ImportError, AttributeError):
    return False
  calls, scalars = Calls(), (int, float, bool, np.ndarray, np.generic, literals.TypedNdArray)
  place = functools.cache(lambda: jax.device_put(np.float32(0)).sharding)

  def put(aval, x, committed):
    devices = list(place().device_set)
    x = np.array(x, order="C")  # no view of another's
    return pxla.batched_device_put(aval, place(), [x], devices, committed, enable_x64=True)

  def ordinary(x):
    return x.sharding == place() if isinstance(x, ArrayImpl) else isinstance(x, scalars)

  def watched():
    """Whether a test wants to know of moved or wrong numbers."""
    state = _jax.guard_lib.thread_local_state()
    guards = (state.host_to_device, state.device_to_host, state.device_to_device)
    return any(guards) or config.debug_nans.value or config.debug_infs.value

  def alone(params):
    """Whether nothing is asked of the program but its results."""
    shardings = (*params["in_shardings"], *params["out_shardings"])
    return (
      all(isinstance(x, UnspecifiedValue) for x in shardings)
      and not any(params["donated_invars"])
      and params["ctx_mesh"].empty
      and not params["compiler_options_kvs"]
    )

  def call(*args, **params):
    jaxpr = params["jaxpr"]
    if params["name"] not in NAMES:
      return compiled(*args, **params)
    count = calls.of.get(jaxpr)
    if count is None:
      count = 0 if alone(params) and _known(jaxpr) else CALLS
    if count >= CALLS or not all(map(ordinary, args)) or watched():
      calls.of[jaxpr] = CALLS
      return compiled(*args, **params)
    calls.of[jaxpr] = count + 1
    with np.errstate(all="ignore"):
      given = [np.asarray(x, v.aval.dtype) for x, v in zip(args, jaxpr.invars, strict=True)]
      results = _run(jaxpr, given)
    committed = any(isinstance(x, ArrayImpl) and x.committed for x in args)
    outs = [put(v.aval, x, committed) for v, x in zip(jaxpr.outvars, results, strict=True)]
    return outs, None, None, []

  def ordinary_key(key):
    return key.ndim == 0 and str(key.dtype) == "key<fry>" and ordinary(key._base_array)

  def of_any_shape(draw):
    names = inspect.signature(draw).parameters

    def drawn(*args, **kwargs):
      given = dict(zip(names, args, strict=False)) | kwargs
      shape, numbers = given["shape"], [x for x in given.values() if isinstance(x, jax.Array)]
      size = math.prod(shape) if shape is not None else 0
      if any(isinstance(x, core.Tracer) for x in numbers) or not 0 < size <= LARGEST:
        return draw(**given)
      bounds = [x for name, x in given.items() if name not in ("key", "shape", "dtype")]
      if any(map(np.ndim, bounds)) or not np.issubdtype(given["dtype"], np.floating):
        return draw(**given)
      if not (config.threefry_partitionable.value and ordinary_key(given["key"])) or watched():
        return draw(**given)
      x = draw(**given | {"shape": (4 ** max(3, math.ceil(math.log(size, 4))),)})
      return put(x.aval.update(shape=shape), np.asarray(x)[:size].reshape(shape), x.committed)

    return drawn

  mock.patch.object(pjit, "_pjit_call_impl_python", call).start()
  for name, draw in draws.items():
    mock.patch.object(random, name, of_any_shape(draw)).start()
  return True

"""Argument checks shared by mixers and models."""

import difflib
import functools
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.export import is_symbolic_dim

from lnssm_jax.ops.core.checks import check_names, check_shape, is_integer, is_number


def check_choice[T](what: str, value: T, choices: Iterable[T], *, note: str = "") -> T:
  """Returns `value`; raises `ValueError` with the nearest choice unless it is one of `choices`.

  The message ends with `note`.
  """
  choices = list(choices)
  if value in choices:
    return value
  names = list(map(str, choices))
  near = [x for y in (str(value), str(value).lower()) for x in difflib.get_close_matches(y, names)]
  hint = f"; did you mean {near[0]!r}?" if near else "."
  listed = ", ".join(repr(choice) for choice in choices) or "(there are none)"
  raise ValueError(f"{what}={value!r} is unknown{hint} Use one of: {listed}.{note}")


def check_positive(name: str, value: Any) -> int:
  """Returns `value` if it is an integer of at least 1 or a symbol of `jax.export`; else raises."""
  if is_symbolic_dim(value):
    return cast(int, value)
  if not is_integer(value) or value < 1:
    raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
  return int(value)


def check_rngs(name: str, rngs: Any) -> None:
  """Raises `ValueError` unless `rngs`, an argument of `name`, are Flax's."""
  if not isinstance(rngs, nnx.Rngs):
    raise ValueError(f"{name}: rngs={rngs!r} must be flax's nnx.Rngs, such as nnx.Rngs(0).")


def check_options(cls: type, options: Mapping[str, Any]) -> None:
  """Raises `ValueError` unless `rngs` are Flax's and flags and numbers of `cls` are given as such.

  They are those that its constructor annotates with bool, or with float and maybe None. An option
  with another library's name raises, too.
  """
  if "rngs" in options:
    check_rngs(cls.__name__, options["rngs"])
  kinds = _kinds(cls)
  check_names(cls.__name__, options, kinds)
  for name, value in options.items():
    kind = kinds.get(name)
    if kind is bool and not isinstance(value, bool):
      raise ValueError(f"{name}={value!r} must be True or False.")
    number = kind is float or (kind == float | None and value is not None)
    if number and (not is_number(value) or math.isnan(value)):
      raise ValueError(f"{name}={value!r} must be a finite number.")


@functools.cache
def _kinds(cls: type) -> dict[str, Any]:
  parameters = inspect.signature(cls.__init__).parameters.values()
  return {x.name: x.annotation for x in parameters}


def check_dtype(name: str, dtype: Any) -> None:
  """Raises `ValueError` unless `dtype` is one of floating point, or None."""
  try:
    floating = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
  except TypeError:
    floating = False
  if not floating:
    raise ValueError(f"{name}={dtype!r} must be a floating-point dtype, such as 'bfloat16'.")


def check_norm_eps(eps: float) -> float:
  """Returns the eps of a norm; raises `ValueError` unless it is a positive number."""
  if not is_number(eps) or not 0 < eps < 1:
    raise ValueError(f"norm_eps={eps!r} must be a number between 0 and 1, such as 1e-5.")
  return float(eps)


def check_finite(name: str, value: float, *, least: float = -math.inf) -> float:
  """Returns `value`; raises `ValueError` unless it is a finite number of at least `least`."""
  if not is_number(value) or not math.isfinite(value) or value < least:
    bound = "" if least == -math.inf else f" of at least {least}"
    raise ValueError(f"{name}={value!r} must be a finite number{bound}.")
  return value


def check_soft_cap(name: str, value: Any) -> float | None:
  """Returns `value`; raises `ValueError` unless it is None or a positive, finite number."""
  if value is not None and not (is_number(value) and 0 < value < math.inf):
    raise ValueError(f"{name}={value!r} must be positive and finite, or None for no cap.")
  return value


def check_heads(dim: int, num_heads: int) -> int:
  """Returns the width of a head, dim / num_heads; raises `ValueError` if it is no integer."""
  check_positive("dim", dim)
  check_positive("num_heads", num_heads)
  if dim % num_heads:
    below = dim - dim % num_heads
    near = f"{below} or {below + num_heads}" if below else f"{num_heads}"
    raise ValueError(
      f"dim={dim} is not a multiple of num_heads={num_heads}; use dim={near}, or another num_heads."
    )
  return dim // num_heads


def check_groups(name: str, number: int | None, num_heads: int) -> int:
  """Returns the number of heads that `num_heads` heads share, all of them for None.

  Raises `ValueError` unless it divides `num_heads`.
  """
  given = check_positive(name, num_heads if number is None else number)
  if num_heads % given:
    raise ValueError(
      f"{name}={number} does not divide num_heads={num_heads}: each key and value head serves "
      "equally many query heads; use a divisor."
    )
  return given


def check_width(name: str, factor: float, of: str, size: int, num_heads: int = 1) -> int:
  """Returns factor * size, `size` being the argument `of`, as a multiple of `num_heads`.

  A factor such as 1 / 49 need not be exact.

  Raises:
    ValueError: `factor` is not a positive number, or gives no whole multiple.
  """
  if not is_number(factor) or not 0 < factor < math.inf:
    raise ValueError(f"{name}={factor!r} must be a positive, finite number.")
  width = round(factor * size)
  if width % num_heads or not math.isclose(width, factor * size, rel_tol=1e-9):
    heads = "integer" if num_heads == 1 else f"multiple of num_heads={num_heads}"
    raise ValueError(
      f"{name}={factor} of {of}={size} gives {factor * size} channels, which must be a positive "
      f"{heads}; change one of them."
    )
  return width


def check_head_widths(
  dim: int, num_heads: int, expand_k: float, expand_v: float
) -> tuple[int, int]:
  """Returns the widths of a head's keys and values, expand_k D / H and expand_v D / H."""
  check_positive("dim", dim)
  check_positive("num_heads", num_heads)
  width = lambda name, factor: check_width(name, factor, "dim", dim, num_heads) // num_heads
  return width("expand_k", expand_k), width("expand_v", expand_v)


def check_normalizer(value: float) -> float:
  """Returns `gate_logit_normalizer`; raises `ValueError` unless it is positive."""
  if not value > 0:
    raise ValueError(f"gate_logit_normalizer={value} must be positive.")
  return value


def check_layer(layer, num_layers: int) -> None:
  """Raises `ValueError` unless 0 <= layer < num_layers; a traced `layer` is not checked."""
  check_positive("num_layers", num_layers)
  if isinstance(layer, int) and not 0 <= layer < num_layers:
    raise ValueError(f"layer={layer} must be at least 0 and less than num_layers={num_layers}.")


def _form_of(state) -> str:
  """The type of a state, and the places of its arrays in it."""
  leaves = jax.tree_util.tree_leaves_with_path(state)
  if [path for path, _ in leaves] == [()]:
    return "a single array"
  return f"{type(state).__name__}({', '.join(jax.tree_util.keystr(path) for path, _ in leaves)})"


def check_state(name: str, state, expected, axes: str) -> None:
  """Raises `ValueError` unless `state` has the structure and the shapes of `expected`."""
  if jax.tree.structure(state) != jax.tree.structure(expected):
    raise ValueError(
      f"{name}: state has the structure {_form_of(state)}, but its own is {_form_of(expected)}; "
      "pass the second result of a call, or init_state(batch_size)."
    )
  paths = jax.tree_util.tree_flatten_with_path(expected)[0]
  for (path, want), got in zip(paths, jax.tree.leaves(state), strict=True):
    check_shape(name, f"state{jax.tree_util.keystr(path)}", got, want.shape, axes)

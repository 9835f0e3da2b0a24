"""Which operations of a traced program compute in a narrow dtype."""

import jax
import jax.numpy as jnp

# Operations that only move or cast numbers, and matrix products, whose sums are float32.
_MOVES = {
  "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dot_general",
  "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather", "iota", "map_alike",
  "optimization_barrier", "pad", "reshape", "rev", "scatter", "select_n", "slice", "split",
  "squeeze", "stop_gradient", "transpose", "unstack",
}  # fmt: skip


def narrow_arithmetic(jaxpr) -> set[str]:
  """Names of the primitives with arguments of fewer than 32 bits, calls and moves left out.

  A mixer promises that decays, norms, gates and sums are float32. An error of that kind changes a
  result by less than the roundings of its products, so no comparison of values sees it.
  """
  found = set()
  for equation in jaxpr.eqns:
    inner = [*map(_jaxprs, equation.params.values())]
    if any(inner):
      for parts in inner:
        found |= set().union(*map(narrow_arithmetic, parts))
    elif equation.primitive.name not in _MOVES and any(map(_is_narrow, equation.invars)):
      found.add(equation.primitive.name)
  return found


def _jaxprs(param) -> list:
  parts = param if isinstance(param, tuple | list) else (param,)
  parts = [getattr(part, "jaxpr", part) for part in parts]  # closed or not
  return [part for part in parts if hasattr(part, "eqns")]


def _is_narrow(variable) -> bool:
  dtype = getattr(variable.aval, "dtype", None)
  floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
  return floating and jax.dtypes.finfo(dtype).bits < 32

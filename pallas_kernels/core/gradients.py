"""`custom_vjp` whose gradients are right under `jax.vmap` with arguments that are not mapped.

Use it in place of `jax.custom_vjp`, everywhere; a test finds those that do not.

JAX runs the backward pass of a `custom_vjp` once per mapped index, and sums the gradients of an
argument that is not mapped. But a result that depends on no mapped argument is not mapped either,
and its cotangent is then the sum over all indices already: in jax 0.11 and 0.12 the backward pass
reads that sum at each index, and it counts as often as there are indices. So all results are mapped
here if one argument is.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Tree = Any


class custom_vjp(jax.custom_vjp):
  """`jax.custom_vjp`; under `jax.vmap` all results have every mapped axis of the arguments.

  Programs that are not mapped stay as they are.
  """

  def __init__(self, function: Callable[..., Any], nondiff_argnums: Sequence[int] = ()):
    @functools.wraps(function)
    def mapped(*arguments):
      return map_alike(function(*arguments), self._arrays(arguments))

    super().__init__(mapped, nondiff_argnums)

  def defvjp(self, fwd, bwd, symbolic_zeros: bool = False, optimize_remat: bool = False) -> None:
    """As that of JAX."""

    @functools.wraps(fwd)
    def mapped(*arguments):
      results, residuals = fwd(*arguments)
      arrays = self._arrays(arguments)
      if symbolic_zeros:
        arrays = [primal.value for primal in arrays]
      same = map_alike(results, arrays)
      # A residual that is a result stays one array with it, and one that is an argument with that.
      of_results = zip(*map(jax.tree.leaves, (results, same)), strict=True)
      replaced = {id(x): y for x, y in of_results if not any(x is z for z in arrays)}
      return same, jax.tree.map(lambda x: replaced.get(id(x), x), residuals)

    super().defvjp(mapped, bwd, symbolic_zeros, optimize_remat)

  def _arrays(self, arguments):
    """All arrays of the arguments under differentiation."""
    static = self.nondiff_argnums
    return jax.tree.leaves([x for n, x in enumerate(arguments) if n not in static])


def map_alike(results: Tree, arguments: Tree) -> Tree:
  """`results`, under `jax.vmap` with every mapped axis of `arguments`; they compile to nothing."""
  arguments = jax.tree.leaves(arguments)
  if not any(isinstance(x, jax.core.Tracer) for x in arguments):
    return results
  # One by one: of those that nothing reads nothing is left.
  return jax.tree.map(lambda x: _map_alike.bind(x, *arguments), results)


# A primitive, not a `jax.custom_batching.custom_vmap`: the derivative of that takes values and
# tangents together, and where JAX splits a program into the two (a second derivative of a
# `jax.lax.scan`) it finds no values.
_map_alike = Primitive("map_alike")
_map_alike.def_impl(lambda result, *arguments: result)
_map_alike.def_abstract_eval(lambda result, *arguments: result)
mlir.register_lowering(_map_alike, lambda context, result, *arguments: [result])
ad.primitive_jvps[_map_alike] = lambda primals, tangents: (_map_alike.bind(*primals), tangents[0])


def _mapped(operands, axes):
  """Where one of them is mapped; an outer `jax.vmap` maps what this returns."""
  result, *arguments = operands
  axis = axes[0]
  if axis is None:
    pairs = zip(arguments, axes[1:], strict=True)
    size = next(x.shape[axis] for x, axis in pairs if axis is not None)
    axis, result = 0, jnp.broadcast_to(result, (size, *result.shape))
  return _map_alike.bind(result, *arguments), axis


batching.primitive_batchers[_map_alike] = _mapped


def no_gradient(tree: Tree) -> Tree:
  """The cotangents of whole numbers and booleans."""
  return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tree)

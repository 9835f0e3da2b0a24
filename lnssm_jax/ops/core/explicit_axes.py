"""Meshes with Explicit axes, the default of `jax.make_mesh`: ops and modules run under Auto axes.

With Explicit axes some JAX functions must be given the sharding of their result. A caller may shard
the batch, so one rule serves all ops: inside, the compiler decides; the results are sharded over
the batch as the argument was.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from lnssm_jax.ops.core.checks import check_names

REPLICATED = -1  # in place of the position of the batch axis: a result without one


def under_auto_axes[**P, Result](
  *, argument: int = 0, results: Any = 0
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
  """Makes a function run under Auto axes if an array is on a mesh with Explicit axes.

  Without such an array the function is called as it is.

  Args:
    argument: position of the argument [B, ...] whose sharding over the batch the results have.
    results: the position of the batch axis in each result, or `REPLICATED`, as a prefix of the tree
      of results.

  Raises:
    ValueError: that argument is sharded over another axis than the batch by an Explicit mesh axis;
      the message says how to make another mesh. Or an argument has another library's name
      (`check_names`). Raised by the function.
  """

  def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
    known = inspect.signature(function).parameters
    name = list(known)[argument]

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Result:
      what = type(args[0]).__name__ if argument and args else function.__name__
      check_names(what, kwargs, known)
      leaves, tree = jax.tree.flatten((args, kwargs))
      meshes = [mesh for mesh in map(_mesh, leaves) if mesh is not None]
      if not meshes or (len(args) <= argument and name not in kwargs):
        return function(*args, **kwargs)  # which raises if the argument is missing
      given = args[argument] if len(args) > argument else kwargs[name]
      spec = _batch_spec(function.__qualname__, jax.tree.leaves(given)[0], meshes[0])
      layout = lambda axis: () if axis == REPLICATED else (*[None] * axis, *spec)
      place = lambda axis: NamedSharding(meshes[0], PartitionSpec(*layout(axis)))
      arrays = [n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

      def run(*values: jax.Array) -> Result:
        new = dict(zip(arrays, values, strict=True))
        args, kwargs = tree.unflatten([new.get(n, leaf) for n, leaf in enumerate(leaves)])
        return function(*args, **kwargs)

      auto: Any = jax.sharding.auto_axes(run, out_sharding=jax.tree.map(place, results))
      return auto(*(leaves[n] for n in arrays))

    return called

  return decorate


def _mesh(leaf: Any) -> Any:
  """The mesh of an array if it has Explicit axes, else None."""
  if not isinstance(leaf, jax.Array):
    return None
  mesh = jax.typeof(leaf).sharding.mesh
  return mesh if mesh.explicit_axes else None


def _batch_spec(name: str, x: Any, mesh: Any) -> tuple[Any, ...]:
  """The entry of the batch axis in the sharding of x, which may be sharded nowhere else."""
  spec = tuple(jax.typeof(x).sharding.spec)
  if any(entry is not None for entry in spec[1:]):
    raise ValueError(
      f"{name}: an argument of shape {x.shape} is sharded as {PartitionSpec(*spec)} over Explicit "
      "mesh axes, which may shard its first axis only; make the mesh with "
      f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}."
    )
  return spec[:1]

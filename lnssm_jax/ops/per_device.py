"""Kernels in a program that the compiler divides: each device runs them on its rows and its heads.

    with jax.set_mesh(mesh):  # axes "data", "fsdp" and "tensor", or some of them
      loss = jax.jit(step)(params, batch)

A kernel is a program for one device, which the compiler cannot divide. But in a scan rows do not
see one another, nor do heads or channels. So it is mapped over the mesh of the program around it
(`jax.shard_map`): rows over "data" and "fsdp", heads or channels over "tensor". Where the arguments
lie so already, nothing is sent. What has none of these axes is copied, and its gradients summed.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec

from lnssm_jax.ops.checks import vary_alike

# The axes of a mesh over which an axis of an array is divided.
MESH_AXES = {"B": ("data", "fsdp"), "H": ("tensor",), "D": ("tensor",)}


class Layout(NamedTuple):
  """The axes of a scan's arguments and results, a letter each, of which `MESH_AXES` are divided.

  One word is for all arrays of a state. An axis of size 1 where others have more is copied.
  """

  arguments: tuple[str, ...]
  results: tuple[str, ...]


class Division(NamedTuple):
  """How a scan is divided over the mesh of the program around it."""

  layout: Layout
  lengths: dict[str, int]  # of the arrays' axes, by letter
  counts: dict[str, int]  # devices along the axes of the mesh that are still to be mapped

  def run(self, scan: Callable, args: tuple):
    """`scan(*args)`, each device computing its part."""
    return self._map(scan, args, tuple(self._spec(axes) for axes in self.layout.results))

  def ask[T](self, question: Callable[..., T], args: tuple) -> T:
    """`question(*args)` about the part of one device, of which only the type is known."""
    answers = []
    ask = lambda *part: answers.append(question(*part))
    jax.eval_shape(lambda: self._map(ask, args, None))
    return answers[-1]

  def _map(self, function, args, out_specs):
    leaves, tree = jax.tree.flatten(args)
    # What is given twice stays one array, because a scan may ask for that.
    once = list({id(x): x for x in leaves}.values())
    places = [next(n for n, y in enumerate(once) if y is x) for x in leaves]
    specs = {id(x): self._spec(axes, x.shape) for axes, x in _named(self.layout, args)}

    def part(*arrays):
      arrays = vary_alike(arrays)
      return function(*tree.unflatten([arrays[place] for place in places]))

    return jax.shard_map(
      part,
      in_specs=tuple(specs[id(x)] for x in once),
      out_specs=out_specs,
      axis_names=set(self.counts),
    )(*once)

  def _spec(self, axes: str, shape: tuple[int, ...] = ()) -> PartitionSpec:
    """Of an array with these axes; of results no shape is needed."""
    return PartitionSpec(*map(self._over, axes, shape or (self.lengths[x] for x in axes)))

  def _over(self, letter: str, size: int) -> tuple[str, ...]:
    """The axes of the mesh that divide an axis of an array."""
    if size != self.lengths[letter]:
      return ()
    return tuple(axis for axis in MESH_AXES.get(letter, ()) if self.counts.get(axis, 1) > 1)


def division(layout: Layout, args: tuple) -> Division | None:
  """How to divide a scan of these arguments; None: not at all, or not evenly.

  The mesh is that of `jax.set_mesh`. Its axes must be those of `MESH_AXES`, left to the compiler.
  """
  mesh, counts = jax.sharding.get_abstract_mesh(), unmapped_axes()
  # Inside a `shard_map` over other axes, jax 0.11 fails to lower the gradient of a second one.
  if mesh.empty or any(mesh.shape[axis] > 1 for axis in mesh.manual_axes):
    return None
  known = {axis for axes in MESH_AXES.values() for axis in axes}
  types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  if any(n > 1 and (x not in known or types[x] != AxisType.Auto) for x, n in counts.items()):
    return None
  lengths = dict.fromkeys(MESH_AXES, 1)
  for axes, x in _named(layout, args):
    for letter, size in zip(axes, x.shape, strict=False):
      lengths[letter] = max(lengths.get(letter, 1), size)
  even = (
    lengths[letter] % math.prod(counts.get(axis, 1) for axis in axes) == 0
    for letter, axes in MESH_AXES.items()
    if any(letter in axes for axes in layout.results)
  )
  return Division(layout, lengths, counts) if all(even) else None


def unmapped_axes() -> dict[str, int]:
  """The axes of the surrounding mesh that no `jax.shard_map` maps over, and their sizes."""
  mesh = jax.sharding.get_abstract_mesh()
  return {axis: mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes}


def _named(layout, args):
  """(Axes, array) of every array."""
  for axes, tree in zip(layout.arguments, args, strict=True):
    for x in jax.tree.leaves(tree):
      yield axes, x

"""Kernels under GSPMD: wraps an op in `shard_map` over the batch and head axes of the ambient mesh.

    with jax.set_mesh(mesh):  # axes "data", "fsdp" and "tensor", or some of them
      loss = jax.jit(step)(params, batch)

A kernel is a program for one device, which the compiler cannot partition. But the rows of a batch
are independent, and so are heads or channels. So the kernel is mapped over the mesh of the program
around it: rows over "data" and "fsdp", heads or channels over "tensor". Arguments that are sharded
so already are not moved. Those without such an axis are replicated, and their gradients summed.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, get_type_hints

import jax
from jax.sharding import AxisType, PartitionSpec

# The axes of a mesh over which an axis of an array is sharded.
MESH_AXES = {"B": ("data", "fsdp"), "H": ("tensor",), "D": ("tensor",)}


def axes_of(inputs: type) -> dict[str, str]:
  """{field: "BTHK"} of a NamedTuple: the strings by which its fields are annotated.

  They are the axes of an array, or of all arrays of a field.
  """
  hints = get_type_hints(inputs, include_extras=True)
  return {name: hint.__metadata__[0] for name, hint in hints.items()}


def with_axes[Inputs](inputs: type[Inputs]) -> type[Inputs]:
  """Decorates a NamedTuple: sets its `AXES`, as of `axes_of`."""
  inputs.AXES = axes_of(inputs)  # pyrefly: ignore
  return inputs


class Division(NamedTuple):
  """How an op is sharded over the mesh of the program around it."""

  axes: tuple[str, ...]  # of the fields of the inputs, one word for all arrays of a field
  results: tuple[str, ...]
  lengths: dict[str, int]  # of the arrays' axes, by letter
  counts: dict[str, int]  # devices along the axes of the mesh that are still to be mapped

  def run(self, scan: Callable, inputs: tuple):
    """`scan(inputs)`, each device computing its shard."""
    return self._map(scan, inputs, tuple(self._spec(axes) for axes in self.results))

  def ask[T](self, question: Callable[..., T], inputs: tuple) -> T:
    """`question(inputs)` about abstract arrays of the shapes that one device has."""
    answers = []
    ask = lambda shard: answers.append(question(shard))
    jax.eval_shape(lambda: self._map(ask, inputs, None))
    return answers[-1]

  def _map(self, function, inputs, out_specs):
    leaves, tree = jax.tree.flatten(inputs)
    # What is given twice stays one array, because an op may compare by identity.
    once = list({id(x): x for x in leaves}.values())
    places = [next(n for n, y in enumerate(once) if y is x) for x in leaves]
    specs = {id(x): self._spec(axes, x.shape) for axes, x in named_arrays(self.axes, inputs)}

    def shard(*arrays):
      arrays = vary_alike(arrays)
      return function(tree.unflatten([arrays[place] for place in places]))

    return jax.shard_map(
      shard,
      in_specs=tuple(specs[id(x)] for x in once),
      out_specs=out_specs,
      axis_names=set(self.counts),
    )(*once)

  def _spec(self, axes: str, shape: tuple[int, ...] = ()) -> PartitionSpec:
    """Of an array with these axes; of results no shape is needed."""
    return PartitionSpec(*map(self._over, axes, shape or (self.lengths[x] for x in axes)))

  def _over(self, letter: str, size: int) -> tuple[str, ...]:
    """The axes of the mesh that shard an axis of an array."""
    if size == 1:
      return ()
    return tuple(axis for axis in MESH_AXES.get(letter, ()) if self.counts.get(axis, 1) > 1)


def division(axes: Iterable[str], results: tuple[str, ...], inputs: tuple) -> Division | None:
  """How to shard an op with these inputs; None: not at all, or not evenly.

  The mesh is that of `jax.set_mesh`. Its axes must be those of `MESH_AXES`, left to the compiler.

  Args:
    axes: the axes of each field of `inputs`, a letter each, of which `MESH_AXES` are sharded. One
      word is for all arrays of a field. An axis of size 1 is replicated; one of fewer heads than
      others, which groups of those share, is sharded like them.
    results: the same for what the op returns.
  """
  axes = tuple(axes)
  mesh, counts = jax.sharding.get_abstract_mesh(), unmapped_axes()
  # Inside a `shard_map` over other axes, jax 0.11 fails to lower the gradient of a second one.
  if mesh.empty or any(mesh.shape[axis] > 1 for axis in mesh.manual_axes):
    return None
  known = {axis for names in MESH_AXES.values() for axis in names}
  types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  if any(n > 1 and (x not in known or types[x] != AxisType.Auto) for x, n in counts.items()):
    return None
  sizes: dict[str, set[int]] = {letter: {1} for letter in MESH_AXES}
  for word, x in named_arrays(axes, inputs):
    for letter, size in zip(word, x.shape, strict=False):
      sizes.setdefault(letter, {1}).add(size)
  lengths = {letter: max(all_sizes) for letter, all_sizes in sizes.items()}
  even = (
    size % math.prod(counts.get(axis, 1) for axis in names) == 0
    for letter, names in MESH_AXES.items()
    if any(letter in word for word in results)
    for size in sizes[letter] - {1} or {1}
  )
  return Division(axes, results, lengths, counts) if all(even) else None


def shares_state(inputs: Any, division: Division) -> bool:
  """Whether devices would compute different heads of queries and each the one state of them all."""
  axes = inputs.AXES.get("state", "")
  if "H" not in axes or not division._over("H", division.lengths["H"]):
    return False
  heads = axes.index("H")
  return any(x.ndim > heads and x.shape[heads] == 1 for x in jax.tree.leaves(inputs.state))


def unmapped_axes() -> dict[str, int]:
  """The axes of the surrounding mesh that no `jax.shard_map` maps over, and their sizes."""
  mesh = jax.sharding.get_abstract_mesh()
  return {axis: mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes}


def named_arrays(axes: Iterable[str], inputs: tuple) -> Iterator[tuple[str, jax.Array]]:
  """(Axes, array) of every array of `inputs`, in the order of the tree; `axes` as in `division`."""
  for word, tree in zip(axes, inputs, strict=True):
    for x in jax.tree.leaves(tree):
      yield word, x


def vary_alike(tree):
  """Gives all arrays of `tree` the same varying axes, which a scan inside `shard_map` needs.

  Elsewhere it changes nothing. Its transpose sums over those axes, so that the gradient of a
  replicated parameter is the sum over the devices.
  """
  axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)))

  def vary(x):
    missing = axes - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

  return jax.tree.map(vary, tree)

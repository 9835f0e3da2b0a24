"""Recurrent states: their registration as pytrees, and what hides their values from XLA."""

from typing import Any

import jax
import jax.export
from jax.tree_util import SequenceKey


def unknown[Tree](tree: Tree) -> Tree:
  """The same arrays, of which XLA knows no values while it compiles.

  XLA for CPUs fuses a product with an array of one constant, such as an empty state, with a sum or
  maximum after it, and then reads memory that nothing has written (jaxlib 0.11.2 and 0.12.0):
  `jnp.sum((q @ jnp.zeros((128, 64)) + c) ** 2, -1)` is wrong, or NaN, in one program and right in
  the next. With a barrier the array is a buffer.
  """
  return jax.lax.optimization_barrier(tree)


class _Field(SequenceKey):
  """A position in a state, printed as the name of the field there."""

  def __init__(self, index: int, name: str):
    super().__init__(index)
    self.name = name

  def __str__(self) -> str:
    return f".{self.name}"


def register_state[State: type](state: State) -> State:
  """Registers a NamedTuple as a pytree with positions as keys; a decorator for states.

  JAX flattens any NamedTuple, but with attribute names as keys. `nnx.tabulate` takes it for a list
  and fails on them (`flax.nnx.summary._unflatten_to_simple_structure`, flax 0.12.10), so that no
  layer with such a state could be printed. Paths still print the names. Programs of `jax.export`
  that take or return a state can be serialized.
  """
  named: Any = state
  fields = named._fields
  keys = [_Field(index, name) for index, name in enumerate(fields)]
  jax.tree_util.register_pytree_with_keys(
    state,
    lambda values: (tuple(zip(keys, values, strict=True)), fields),
    lambda _, values: named(*values),
    lambda values: (tuple(values), fields),
  )
  jax.export.register_pytree_node_serialization(
    named,
    serialized_name=f"{named.__module__}.{named.__qualname__}",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: fields,
  )
  return state

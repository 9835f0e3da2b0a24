"""Grouped heads: some arguments have H heads, the others G, of which each serves H / G neighbors.

Head h of H reads head h // (H / G) of G. XLA's forms are mapped over the H / G heads of a group by
`jax.vmap`. An argument of G heads is not mapped: it is an operand of all of them as it is, its
gradient is their sum, and what depends on such arguments alone is computed once per group. Kernels
read head h // (H / G) where they load.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.spmd import named_arrays


def head_counts(inputs: Any) -> tuple[int, int]:
  """(H, G): the most and the fewest heads of q, k and v."""
  counts = [x.shape[2] for x in (inputs.q, inputs.k, inputs.v)]
  return max(counts), min(counts)


def state_heads(*arrays: jax.Array | None) -> int:
  """The heads of the state: the most of what it depends on, [B, T, heads, ...]; not the queries.

  Several heads of queries read one state if keys, values and decays are shared.
  """
  return max(x.shape[2] for x in arrays if x is not None)


def with_all_heads(inputs: Any) -> Any:
  """Checked arguments with copies of shared heads for each of H, but in the state."""
  H, G = head_counts(inputs)
  if H == G:
    return inputs

  def repeat(axes, x):
    place = axes.find("H")
    return x if place < 0 or x.shape[place] == H else jnp.repeat(x, H // x.shape[place], place)

  repeated = {
    name: jax.tree.map(functools.partial(repeat, axes), getattr(inputs, name))
    for name, axes in inputs.AXES.items()
    if name != "state"
  }
  return inputs._replace(**repeated)


def form_over_groups(
  form: Callable[[Any, Any], tuple[Any, Any]], *, reads_groups: bool = False
) -> Callable[..., tuple[Any, Any]]:
  """`form(inputs, options) -> (out [B, T, H, V], state [B, heads, ...])` for grouped heads too.

  Args:
    reads_groups: whether `form` itself takes queries of more heads than all else, and so a state. A
      form with a backward pass of its own must: all its results are mapped, the state too (see
      `pallas_kernels.core.gradients`).
  """

  def run(inputs, options):
    H, G = head_counts(inputs)
    shared_state = inputs.state.kv.shape[1] < H
    if H == G or (shared_state and reads_groups):
      return form(inputs, options)
    axes = 2, None if shared_state else 1
    return over_groups(lambda inputs: form(inputs, options), inputs, axes)

  return run


def over_readers(function: Callable[..., Any], heads: int, *arrays: tuple[Any, int]) -> Any:
  """`function` of arrays, mapped over the heads of queries that read one of `heads` states.

  Args:
    arrays: (array or None, its axis of heads); those with more than `heads` are mapped.

  Returns:
    What `function` returns; with mapped arguments the heads, axis 2 of the results, are theirs.
  """
  axes = [axis if x is not None and x.shape[axis] > heads else None for x, axis in arrays]
  if all(axis is None for axis in axes):
    return function(*(x for x, _ in arrays))
  cut = [
    x if axis is None else x.reshape(*x.shape[:axis], heads, -1, *x.shape[axis + 1 :])
    for (x, _), axis in zip(arrays, axes, strict=True)
  ]
  places = [None if axis is None else axis + 1 for axis in axes]
  results = jax.vmap(function, in_axes=places, out_axes=3)(*cut)
  return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:]), results)


def over_groups(function: Callable[[Any], Any], inputs: Any, axes: Sequence[int | None]) -> Any:
  """`function(inputs)`, a tuple, mapped over the heads of a group.

  Args:
    inputs: checked arguments, whose `AXES` name the axes of their arrays; those of H heads are
      mapped.
    axes: the axis of the heads in the arrays of each result; None for results of G heads, which
      may not depend on a mapped argument.
  """
  H, G = head_counts(inputs)
  leaves, places = [], []
  for word, x in named_arrays(inputs.AXES.values(), inputs):
    place = word.find("H")
    mapped = place >= 0 and x.shape[place] == H
    places.append(place + 1 if mapped else None)
    shape = (*x.shape[:place], G, H // G, *x.shape[place + 1 :])
    leaves.append(x.reshape(shape) if mapped else x)

  def joined(x, place):
    """[..., G or 1, H / G, ...] -> [..., H, ...]."""
    before, after = x.shape[:place], x.shape[place + 2 :]
    return jnp.broadcast_to(x, (*before, G, H // G, *after)).reshape(*before, H, *after)

  tree = jax.tree.structure(inputs)
  mapped = jax.vmap(
    lambda leaves: function(tree.unflatten(leaves)),
    in_axes=(places,),
    out_axes=tuple(None if place is None else place + 1 for place in axes),
  )
  return tuple(
    result if place is None else jax.tree.map(lambda x, place=place: joined(x, place), result)
    for result, place in zip(mapped(leaves), axes, strict=True)
  )

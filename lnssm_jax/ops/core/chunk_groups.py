"""A long sequence by groups of chunks: memory for one group, in the backward pass too.

A chunked form holds arrays for all its chunks at once: scores, decayed queries and keys, states.
Here it runs over a few chunks at a time. The residuals are the arguments and the states between the
groups; the backward pass runs from the last group to the first and computes each again. A forward
pass alone keeps no states, so that its groups are as small as is worth a loop.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from lnssm_jax.ops.core.chunking import over_chunks
from lnssm_jax.ops.core.grouped_heads import form_over_groups
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.segments import Segments, no_gradient
from lnssm_jax.ops.core.spmd import vary_alike
from pallas_kernels.core.gradients import custom_vjp

_MOST_GROUPS = 8  # whose states are kept
_SMALLEST = 1 << 20  # numbers in the arrays by token of a group: fewer are not worth a loop

Tree = Any


class Sizes(NamedTuple):
  """Tokens per group, multiples of a chunk's."""

  alone: int  # of a forward pass without a backward pass
  both: int  # of both passes


def group_sizes(tokens: Tree, chunk_size: int) -> Sizes:
  """The sizes of groups; all tokens where memory does not matter."""
  arrays = jax.tree.leaves(tokens)
  length = arrays[0].shape[1]
  if any(is_symbolic_dim(size) for x in arrays for size in x.shape):
    return Sizes(length, length)
  groups = sum(x.size for x in arrays) // _SMALLEST
  chunks = -(-length // chunk_size)
  size = lambda groups: length if groups < 2 else chunk_size * -(-chunks // groups)
  return Sizes(size(groups), size(min(_MOST_GROUPS, groups)))


def run_inputs(form: Callable[[Any], tuple[jax.Array, Tree]], inputs: Any, chunk_size: int):
  """`form(inputs) -> (out [B, T, H, V], state)` group by group, for grouped heads too.

  `inputs` have `AXES`, a `state` and `segments`; `chunk_size` tokens are a chunk of `form`, which
  takes queries of more heads than all else.
  """
  over_heads = form_over_groups(lambda inputs, _: form(inputs), reads_groups=True)
  length = inputs.q.shape[1]
  by_token = lambda name, axes: axes[1:2] == "T" and name != "segments"
  arrays = {
    name: getattr(inputs, name) for name, axes in inputs.AXES.items() if by_token(name, axes)
  }
  tokens = {n: x for n, x in arrays.items() if x is not None and x.shape[1] == length}
  sizes = group_sizes(tokens, chunk_size)
  if sizes.both >= length:
    return over_heads(inputs, None)
  if inputs.segments is not None:
    before = jnp.pad(inputs.segments.index[:, :-1], ((0, 0), (1, 0)))  # of the token before
    tokens |= {"segments": (inputs.segments, before)}
  parameters = inputs._replace(**dict.fromkeys(tokens), state=None)

  def group(tokens, parameters, state):
    segments = None
    if "segments" in tokens:
      (index, ids), before = tokens["segments"]
      segments = Segments(index - before[:, :1], ids)
    inputs = parameters._replace(**tokens | {"state": state, "segments": segments})
    return over_heads(inputs, None)

  return run(group, sizes, tokens, parameters, inputs.state)


def run(form: Callable[..., tuple[jax.Array, Tree]], sizes: Sizes, tokens, parameters, state):
  """`form(tokens, parameters, state) -> (out [B, T, ...], state)` group by group.

  Args:
    form: closes over no array that has a gradient.
    tokens: arrays [B, T, ...].
    parameters: arrays without time. Their gradients add up over groups in float32 or wider.
  """
  return _run(form, sizes, *vary_alike((tokens, parameters, state)))


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def _run(form, sizes, tokens, parameters, state):
  return _over_groups(form, sizes.alone, tokens, parameters, state)[0]


def _forward(form, sizes, tokens, parameters, state):
  return _over_groups(form, sizes.both, tokens, parameters, state)


def _over_groups(form, size, tokens, parameters, state):
  def group(state, tokens, _):
    out, after = form(tokens, parameters, state)
    return after, (out, state)

  state, out, entering = over_chunks(group, state, tokens, size=size, reverse=False)
  return (out, state), (tokens, parameters, entering)


def _backward(form, sizes, residuals, cotangents):
  tokens, parameters, entering = residuals
  d_out, d_state = cotangents

  def group(carry, by_token, entering):
    d_state, d_parameters = carry
    tokens, d_out = by_token
    _, vjp = jax.vjp(
      lambda xs, ys, state: form(_merged(xs, tokens), _merged(ys, parameters), state),
      *map(_differentiable, (tokens, parameters)),
      entering,
    )
    d_tokens, d_more, d_state = vjp((d_out, d_state))
    add = lambda x, y: x + y.astype(x.dtype)
    return (d_state, jax.tree.map(add, d_parameters, d_more)), (d_tokens, ())

  nothing = jax.tree.map(lambda x: jnp.zeros_like(wide(x)), _differentiable(parameters))
  (d_state, d_parameters), d_tokens, _ = over_chunks(
    group, (d_state, nothing), (tokens, d_out), entering, size=sizes.both, reverse=True
  )
  cast = lambda x, y: no_gradient(y) if x is None else x.astype(y.dtype)
  by_array = lambda gradients, arrays: jax.tree.map(cast, gradients, arrays, is_leaf=_is_none)
  return by_array(d_tokens, tokens), by_array(d_parameters, parameters), d_state


_run.defvjp(_forward, _backward)


def _is_none(x):
  return x is None


def _differentiable(tree):
  """The arrays that have gradients; None for whole numbers and booleans."""
  return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)


def _merged(some, tree):
  """`tree` with those arrays of `some` that are not None."""
  return jax.tree.map(lambda x, y: y if x is None else x, some, tree, is_leaf=_is_none)

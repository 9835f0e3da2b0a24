"""Promises of ops other than their values: checks that are the same for all of them.

A scan is given as `call(inputs, **options)`, with `inputs` a dictionary of arrays in which `steps`
names those that have a time axis (axis 1), and `options` the keyword arguments of the public
function; or compiled, as `run(inputs, state, segment_ids)`. Both return (out, state). `compared`
gives what counts of these two. `others` are inputs like `inputs` with other numbers.
"""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np

from tests.ops import contract


def close(got, want, dtype=jnp.float32, length=64):
  """Asserts that all arrays of two trees agree within the contract's tolerance."""
  limit = contract.tolerance(dtype, length)
  chex.assert_trees_all_equal_comparator(
    lambda got, want: contract.relative_error(got, want) <= limit,  # NaN is not
    lambda got, want: f"relative error {contract.relative_error(got, want):.2e} > {limit:.2e}",
    got,
    want,
  )


def in_float64(fn, *arrays):
  """The results of `fn`, computed in float64."""
  with jax.enable_x64(True):
    return jax.tree.map(np.asarray, fn(*(jnp.asarray(np.asarray(x, np.float64)) for x in arrays)))


def cut(inputs, steps, start, end):
  """The inputs of some of the steps."""
  return {name: x[:, start:end] if name in steps else x for name, x in inputs.items()}


def documents(batch, lengths):
  """Segment ids [B, T] that skip numbers and come back to an earlier one."""
  ids = 3 * (np.arange(len(lengths)) % 2)
  return jnp.asarray(np.repeat(ids, lengths)[None].repeat(batch, 0), jnp.int32)


# The lengths of documents, and pieces of them that begin at, before, at the end of and after their
# boundaries. Few lengths differ, since each is compiled; none is a multiple of a chunk.
LENGTHS = (7, 7, 7, 2)
CUTS = (1, *range(8, 16), 22)
PACKED = (1, 7, 7, 7, 1)


def splitting_changes_nothing(
  run, inputs, steps, compared, *, lengths=LENGTHS, cuts=CUTS, dtype=jnp.float32
):
  """Passing the state on equals one call; a state is not passed on between documents."""
  segments = documents(inputs[steps[0]].shape[0], lengths)
  boundaries = {0, *np.cumsum(lengths)}
  state, outs = None, []
  for start, end in zip([0, *cuts], [*cuts, sum(lengths)], strict=True):
    piece = cut(inputs, steps, start, end)
    out, state = run(piece, None if start in boundaries else state, segments[:, start:end])
    outs.append(out)
  close(compared(jnp.concatenate(outs, 1), state), compared(*run(inputs, None, segments)), dtype)


def packing_changes_nothing(
  run, inputs, others, steps, compared, *, infinite, alone=None, lengths=PACKED, dtype=jnp.float32
):
  """Documents in one row equal the documents apart, and no number in one reaches another.

  With `infinite`, an infinite one neither. The documents apart are computed by `alone`, if given.
  """
  segments = documents(inputs[steps[0]].shape[0], lengths)
  ends = np.cumsum(lengths)
  packed, last = run(inputs, None, segments)
  apart = [
    (alone or run)(cut(inputs, steps, end - n, end), None, segments[:, end - n : end])
    for n, end in zip(lengths, ends, strict=True)
  ]
  want = compared(jnp.concatenate([out for out, _ in apart], 1), apart[-1][1])
  close(compared(packed, last), want, dtype)

  begin, end = ends[1], ends[2]
  outside = lambda out: jnp.concatenate([out[:, :begin], out[:, end:]], 1)
  changed = {n: x.at[:, begin:end].set(others[n][:, begin:end]) for n, x in inputs.items()
             if n in steps}  # fmt: skip
  out, state = run(inputs | changed, None, segments)
  assert not np.allclose(out[:, begin:end], packed[:, begin:end])
  chex.assert_trees_all_equal((outside(out), state), (outside(packed), last))
  if infinite:
    poisoned = {n: x.at[:, begin].set(jnp.inf) if n in steps else x for n, x in inputs.items()}
    out, state = run(poisoned, None, segments)
    assert not jnp.isfinite(out[:, begin:end]).all()
    close(compared(outside(out), state), compared(outside(packed), last), dtype)


def nothing_flows_backwards_in_time(run, inputs, others, steps, *, infinite):
  """Bit for bit: outputs before a step do not depend on it, nor on what follows.

  With `infinite`, not even if the step is NaN.
  """
  batch, length = inputs[steps[0]].shape[:2]
  at, segments = 13, documents(batch, (length,))
  following = {n: x.at[:, at:].set(others[n][:, at:]) for n, x in inputs.items() if n in steps}
  nan = {n: x.at[:, at].set(jnp.nan) for n, x in inputs.items() if n in steps}
  before = run(inputs, None, segments)[0]
  for changed in (following, nan) if infinite else (following,):
    after = run(inputs | changed, None, segments)[0]
    chex.assert_trees_all_equal(before[:, :at], after[:, :at])
    assert not np.allclose(before[:, at:], after[:, at:])


def works_under_every_transformation(
  call, inputs, others, steps, implementations, *, checkpoint=jax.checkpoint
):
  """vmap, checkpoint inside scan, and shard_map give what plain calls give, with all gradients."""

  def loss(inputs, call=call):
    out = call(inputs)[0]
    return jnp.sum(jnp.abs(out) ** 2), out

  gradients = lambda loss: jax.value_and_grad(loss, has_aux=True)
  plain = jax.jit(gradients(loss))
  want, second = plain(inputs), plain(others)
  both = jax.tree.map(lambda *x: jnp.stack(x), want, second)
  stacked = jax.tree.map(lambda *x: jnp.stack(x), inputs, others)
  close(jax.jit(jax.vmap(gradients(loss)))(stacked), both)
  recomputed = gradients(checkpoint(loss))
  close(jax.jit(lambda x: jax.lax.scan(lambda _, x: (_, recomputed(x)), 0, x)[1])(stacked), both)

  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  data, replicated = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
  for implementation in implementations:
    sharded = jax.shard_map(
      lambda x: (call(x, implementation=implementation)[0], 0.0),  # noqa: B023
      mesh=mesh,
      in_specs=({n: data if n in steps else replicated for n in inputs},),
      out_specs=(data, replicated),
    )
    close(jax.jit(gradients(lambda x: loss(x, sharded)))(inputs), want)  # noqa: B023


def gradient_equals_finite_differences(call, inputs, compared):
  """The reference's gradient, along a random direction, in float64."""
  rng = np.random.default_rng(3)
  with jax.enable_x64(True):
    inputs = {n: jnp.asarray(x, jnp.float64) for n, x in inputs.items()}
    direction = {n: jnp.asarray(rng.normal(size=x.shape)) * x for n, x in inputs.items()}

    def along(h):
      moved = jax.tree.map(lambda x, d: x + h * d, inputs, direction)
      results = compared(*call(moved, implementation="reference"))
      return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(results))

    h = 1e-5
    value, slope = jax.jit(along), jax.jit(jax.grad(along))
    np.testing.assert_allclose(slope(0.0), (value(h) - value(-h)) / (2 * h), rtol=1e-7)


def derivatives_in_float64_are_right(call, inputs, others, compared):
  """Values and the derivative of a gradient along `others`, against the reference."""

  def both(implementation):
    run = lambda x: call(x, implementation=implementation)
    gradient = jax.grad(lambda x: jnp.sum(jnp.abs(run(x)[0]) ** 3))
    along = lambda x: sum(jnp.vdot(g, others[n]) for n, g in gradient(x).items())
    return jax.jit(lambda x: (compared(*run(x)), jax.grad(along)(x)))(inputs)

  with jax.enable_x64(True):
    inputs, others = (jax.tree.map(lambda x: x.astype(jnp.float64), x) for x in (inputs, others))
    close(both(None), both("reference"), dtype=jnp.float64)


def largest_array(fn, *shapes) -> int:
  """The real numbers in the largest array anywhere in the compiled `fn`."""
  return measure(fn, *shapes)[0]


def temporary_bytes(fn, *shapes) -> int:
  """Bytes that the compiled `fn` needs next to its arguments and results."""
  return measure(fn, *shapes)[1]


def measure(fn, *shapes) -> tuple[int, int]:
  """`largest_array` and `temporary_bytes`, compiled once."""
  compiled = jax.jit(fn).lower(*shapes).compile()
  arrays = re.findall(r"\b(pred|bf16|[cfsu]\d+)\[([\d,]+)\]", compiled.as_text())
  parts = lambda dtype: 2 if dtype.startswith("c") else 1
  largest = max(parts(dtype) * math.prod(map(int, size.split(","))) for dtype, size in arrays)
  return largest, compiled.memory_analysis().temp_size_in_bytes

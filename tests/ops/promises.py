"""What scans promise beside their values: checks that are the same for scans of one kind.

A scan is given as `call(inputs, **options)`, with `inputs` a dictionary of arrays in which `steps`
names those that have a time axis (axis 1), and `options` the keyword arguments of the public
function. `call` returns (out, state).
"""

import re

import jax
import jax.numpy as jnp
import numpy as np

from tests.ops import contract


def close(got, want, dtype=jnp.float32, length=64):
  """Asserts that all arrays of two trees agree within the contract's tolerance."""
  errors = jax.tree.leaves(jax.tree.map(contract.relative_error, got, want))
  assert max(errors) <= contract.tolerance(dtype, length), errors


def cut(inputs, steps, start, end):
  """The inputs of some of the steps."""
  return {name: x[:, start:end] if name in steps else x for name, x in inputs.items()}


def splitting_changes_nothing(call, inputs, steps, cuts):
  """Passing the state on equals one call; a state is not passed on between documents."""
  batch, length = inputs[steps[0]].shape[:2]
  document = 7
  segments = jnp.asarray(np.arange(length) // document * np.ones((batch, 1)), jnp.int32)
  whole = jax.jit(lambda inputs: call(inputs, segment_ids=segments))(inputs)
  state, outs = None, []
  piece_of = jax.jit(
    lambda piece, state, segments: call(piece, initial_state=state, segment_ids=segments)
  )
  for start, end in zip([0, *cuts], [*cuts, length], strict=True):
    if start % document == 0:
      state = None
    out, state = piece_of(cut(inputs, steps, start, end), state, segments[:, start:end])
    outs.append(out)
  close((jnp.concatenate(outs, 1), state), whole)


def packing_changes_nothing(call, inputs, steps, lengths):
  """Documents of these lengths in one row equal the documents apart, an infinite one included."""
  batch, length = inputs[steps[0]].shape[:2]
  assert sum(lengths) == length
  ids = 3 * (np.arange(len(lengths)) % 2)  # skips numbers and comes back to an earlier one
  segments = jnp.asarray(np.repeat(ids, lengths)[None].repeat(batch, 0), jnp.int32)
  ends = np.cumsum(lengths)

  packed_call = jax.jit(lambda inputs: call(inputs, segment_ids=segments))

  def outputs(inputs):
    packed, last = call(inputs, segment_ids=segments)
    apart = [call(cut(inputs, steps, end - n, end)) for n, end in zip(lengths, ends, strict=True)]
    return packed, last, jnp.concatenate([out for out, _ in apart], 1), apart[-1][1]

  packed, last, apart, last_apart = outputs(inputs)
  close((packed, last), (apart, last_apart))
  # What is infinite in one document stays there: documents are not separated by a factor of 0.
  begin, end = ends[1], ends[2]
  poisoned = {n: x.at[:, begin].set(jnp.inf) if n in steps else x for n, x in inputs.items()}
  out, state = packed_call(poisoned)
  assert not jnp.isfinite(out[:, begin:end]).all()
  others = jnp.concatenate([out[:, :begin], out[:, end:]], 1)
  close((others, state), (jnp.concatenate([packed[:, :begin], packed[:, end:]], 1), last))


def nothing_flows_backwards_in_time(call, inputs, steps):
  """Bit for bit: outputs before a step do not depend on it."""
  at = 13
  changed = {n: x.at[:, at].multiply(0.5) if n in steps else x for n, x in inputs.items()}
  out = jax.jit(lambda x: call(x)[0])
  before, after = out(inputs), out(changed)
  np.testing.assert_array_equal(before[:, :at], after[:, :at])
  assert not np.allclose(before[:, at:], after[:, at:])


def works_under_every_transformation(call, inputs, steps):
  """vmap, checkpoint, scan, shard_map give what a plain call gives; the last with gradients."""
  parameters = {n: x for n, x in inputs.items() if n not in steps}
  arrays = {n: inputs[n] for n in steps}
  out = lambda arrays: call(arrays | parameters)[0]
  gradients = lambda f: jax.jit(jax.value_and_grad(lambda x: jnp.sum(f(x) ** 2)))
  plain = jax.jit(out)(arrays)
  stacked = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), arrays)
  halved = jax.jit(out)(jax.tree.map(lambda x: 0.5 * x, arrays))
  mapped = jax.jit(jax.vmap(out))(stacked)
  close((mapped[0], mapped[1]), (plain, halved))
  _, scanned = jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, out(x)), 0, x))(stacked)
  close(scanned, mapped)

  whole = lambda x: call(x)[0]
  want = gradients(whole)(inputs)
  close(gradients(jax.checkpoint(whole))(inputs), want)
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  spec, replicated = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
  sharded = jax.shard_map(
    lambda x: call(x)[0],
    mesh=mesh,
    in_specs=({n: spec if n in steps else replicated for n in inputs},),
    out_specs=spec,
  )
  close(gradients(sharded)(inputs), want)


def gradient_equals_finite_differences(call, inputs, **options):
  """The reference's gradient, along a random direction, in float64."""
  rng = np.random.default_rng(3)
  with jax.enable_x64(True):
    inputs = {n: jnp.asarray(x, jnp.float64) for n, x in inputs.items()}
    direction = {n: jnp.asarray(rng.normal(size=x.shape)) * x for n, x in inputs.items()}

    def functional(inputs):
      out, state = call(inputs, implementation="reference", **options)
      return jnp.sum(out**2) + sum(jnp.sum(jnp.sin(s)) for s in state)

    along = jax.jit(lambda h: functional(jax.tree.map(lambda x, d: x + h * d, inputs, direction)))
    h = 1e-5
    want = (along(h) - along(-h)) / (2 * h)
    close(jax.jit(jax.grad(along))(0.0), want)


def second_derivatives_are_right(call, inputs):
  """The derivative of a gradient along a direction: the chunked form against the reference."""

  def directional(implementation):
    loss = lambda x: jnp.sum(call(x, implementation=implementation)[0] ** 3)
    along = lambda x: sum(jnp.sum(g * jnp.cos(g)) for g in jax.tree.leaves(jax.grad(loss)(x)))
    return jax.jit(jax.grad(along))(inputs)

  with jax.enable_x64(True):
    inputs = {n: jnp.asarray(x, jnp.float64) for n, x in inputs.items()}
    close(directional("chunked"), directional("reference"))


def largest_array(fn, *shapes) -> int:
  """The number of elements of the largest array anywhere in the compiled `fn`."""
  text = jax.jit(fn).lower(*shapes).compile().as_text()
  sizes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", text)
  return max(int(np.prod([int(n) for n in size.split(",")])) for size in sizes)


def temporary_bytes(fn, *shapes) -> int:
  """Bytes that the compiled `fn` needs beside its arguments and results."""
  return jax.jit(fn).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

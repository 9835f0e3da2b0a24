"""Checks on a GPU: values and gradients, bits that repeat, in memory full of NaN.

A scan is given as `call(inputs, implementation)`, with arrays by name and results by name. A
problem is `problem(seed)`, its inputs and its weights, made on the device.

Several tests run at a time, in threads (conftest.py). One of them is `alone` with the GPU: nothing
is written to memory between the NaN that fills it and the kernels. Meanwhile the others compile
their programs (`compiled`).
"""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.ops.core import cases
from tests.ops import contract, promises

REPETITIONS = 100

# Held by the test that uses the GPU, and by one that traces a program: in Python, of which one
# thread runs at a time. If both wait for the GIL in turns, each takes several times as long.
alone = threading.Lock()


def compiled(fn, *args, x64=False):
  """`fn` for arrays like `args`, with the shapes of its results as `out_info`; x64: in float64."""
  with jax.enable_x64(x64):
    with alone:
      lowered = jax.jit(fn).lower(*args)
    program = lowered.compile()

  @functools.wraps(fn)
  def run(*arrays):
    with jax.enable_x64(x64):
      return program(*arrays)

  run.out_info = program.out_info
  return run


def fill_memory_with_nan():
  """Makes memory that is allocated next hold NaN until it is written."""
  device = jax.devices()[0]
  stats = device.memory_stats()
  block = 2**32  # bytes; few, since each is a call
  blocks = int(0.8 * (stats["bytes_limit"] - stats["bytes_in_use"])) // block
  arrays = [jnp.full((block // 4,), jnp.nan, jnp.float32) for _ in range(blocks)]
  jax.block_until_ready(arrays)
  for x in arrays:
    x.delete()


def same_bits(a, b):
  bits = lambda x: jax.lax.bitcast_convert_type(
    x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32
  )
  same = jax.tree.map(lambda x, y: jnp.all(bits(x) == bits(y)), a, b)
  return jnp.all(jnp.stack(jax.tree.leaves(same)))


def assert_bits_repeat(run, arrays, same):
  """`run(*arrays)` gives the same bits again and again, in memory full of NaN now and then.

  `same` is `same_bits`, compiled. Returns the results.
  """
  fill_memory_with_nan()
  first, counts = run(*arrays), []
  for n in range(REPETITIONS):
    if n % 25 == 0:
      fill_memory_with_nan()
    counts.append(same(run(*arrays), first))
  counts = np.asarray(jax.device_get(counts))
  assert counts.all(), f"{counts.sum()} of {REPETITIONS} agree"
  return first


def errors_against_reference(fn, inputs, dtypes, implementation):
  """As in `contract`, of kernels in memory full of NaN."""
  inputs = jax.tree.map(contract.round_to, inputs, dtypes)
  shapes = lambda dtypes: jax.tree.map(
    lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype), inputs, dtypes
  )
  both = lambda form: contract.with_gradients(lambda x: fn(x, form))
  kernels = compiled(both(implementation), shapes(dtypes))
  exact = shapes(jax.tree.map(lambda dtype: np.dtype(np.float64), dtypes))
  reference = compiled(both("reference"), exact, x64=True)
  with alone:
    want = contract.by_path(reference(inputs))
    passed = jax.tree.map(jnp.asarray, inputs, dtypes)
    fill_memory_with_nan()
    got = contract.by_path(kernels(passed))
  return contract.named_errors(got, want)


def segment_ids(length):
  """Those of cases, and in row 1 of 1000 tokens a document that begins with the middle split.

  Kernels cut 1000 tokens, padded to 1024, into 2, 4 or 8 splits.
  """
  ids = cases.segment_ids(length)
  return ids.at[1, 512:].add(6) if length == 1000 else ids


def assert_values_and_gradients(scan, case, dtype, implementation="pallas"):
  """The kernels of a scan on a case of its contract, in memory full of NaN."""
  options = {"segment_ids": segment_ids(case.T)} if case.segments else {}
  call = lambda x, form: scan.compared(*scan(case, x, implementation=form, **options))
  inputs = scan.inputs(case)
  dtypes = contract.dtypes_of(scan, inputs, dtype)
  errors = errors_against_reference(call, inputs, dtypes, implementation)
  contract.assert_small(errors, dtype, case.T, strength=case.strength)


def functional(results, weights):
  """The sum of all results, each weighted."""
  return sum(jnp.sum(y.astype(weights[n].dtype) * weights[n]) for n, y in results.items())


def with_gradients(call, implementation):
  """A function of inputs and weights: results of `call`, and the gradients of their functional."""

  def both(inputs, weights):
    def weighted(inputs):
      results = call(inputs, implementation)
      return functional(results, weights), results

    (_, results), gradients = jax.value_and_grad(weighted, has_aux=True)(inputs)
    return {"values": results, "gradients": gradients}

  return both


def shapes_of(call, inputs):
  return jax.eval_shape(functools.partial(call, implementation="reference"), inputs)


def random_weights(call, inputs):
  """Multiples of 1/8, which every dtype holds exactly."""
  shapes = shapes_of(call, inputs)
  keys = jax.random.split(jax.random.key(1), len(shapes))
  return {
    n: jnp.round(8 * jax.random.normal(key, s.shape)) / 8
    for key, (n, s) in zip(keys, shapes.items(), strict=True)
  }


def waves(call, inputs):
  """Weights in which no two tokens of "out" [B, T, D] are alike; of all else they are 1."""
  weights = {n: jnp.ones(s.shape) for n, s in shapes_of(call, inputs).items()}
  wave = jnp.cos(jnp.arange(weights["out"].shape[1]))[:, None]
  return weights | {"out": weights["out"] * wave}


_SEED = jax.ShapeDtypeStruct((), jnp.int32)


def assert_part_matches_reference(call, problem, part, dtype, implementation="pallas"):
  """Every bit of all results repeats; a part of them equals the reference in float64.

  `part(arrays)` takes the same heads or channels of inputs, weights, results and gradients: what
  is in the part depends on nothing outside of it.
  """

  def draw(seed):
    arrays = problem(seed)
    return arrays, [part(x) for x in arrays]

  def exact(*parts):
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), parts)
    return with_gradients(call, "reference")(*wide)

  def look(results):
    finite = jax.tree.map(lambda x: jnp.isfinite(x).all(), results)
    return finite, {kind: part(arrays) for kind, arrays in results.items()}

  make = compiled(draw, _SEED)
  arrays, parts = make.out_info
  length = arrays[1]["out"].shape[1]
  run = compiled(with_gradients(call, implementation), *arrays)
  look = compiled(look, run.out_info)
  same = compiled(same_bits, run.out_info, run.out_info)
  reference = compiled(exact, *parts, x64=True)
  with alone:
    arrays, parts = make(jnp.int32(0))
    finite, got = jax.device_get(look(assert_bits_repeat(run, arrays, same)))
    assert all(jax.tree.leaves(finite)), finite
    want = jax.device_get(reference(*parts))
  contract.assert_small(contract.named_errors(got, want), dtype, length)


def assert_vmap_matches_separate_calls(call, problem, mapped):
  """`vmap` runs the same kernels over a larger grid, and `grad` of it sums what calls share.

  First all inputs are mapped, under `vmap` of the gradients. Then `mapped` alone, under the
  gradient of `vmap`: results that do not depend on it have cotangents that are summed already.
  """
  both = with_gradients(call, "pallas")

  def of_shared(several, shared, weights):
    def weighted(several, shared):
      one = lambda x: call(shared | {mapped: x}, "pallas")
      results = jax.vmap(one)(several)
      return functional(results, weights), results

    gradient = jax.value_and_grad(weighted, (0, 1), has_aux=True)
    (_, results), gradients = gradient(several, shared)
    return {"values": results, "gradients": gradients[1] | {mapped: gradients[0]}}

  make = compiled(problem, _SEED)
  inputs, weights = make.out_info
  separate = compiled(both, inputs, weights)
  twice = lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype)
  all_mapped = compiled(jax.vmap(both, (0, None)), jax.tree.map(twice, inputs), weights)
  shared = {n: x for n, x in inputs.items() if n != mapped}
  one_mapped = compiled(of_shared, twice(inputs[mapped]), shared, weights)
  stack = lambda *x: jnp.stack(x)
  with alone:
    (first, weights), (second, _) = make(jnp.int32(0)), make(jnp.int32(1))
    fill_memory_with_nan()
    got = all_mapped(jax.tree.map(stack, first, second), weights)
    want = [separate(x, weights) for x in (first, second)]
    promises.close(got, jax.tree.map(stack, *want))

    shared = {n: x for n, x in first.items() if n != mapped}
    several = stack(first[mapped], second[mapped])
    fill_memory_with_nan()
    got = jax.device_get(one_mapped(several, shared, weights))
    want[1] = separate(first | {mapped: second[mapped]}, weights)
    want = jax.device_get(want)
  wide = lambda x: np.asarray(x, np.float64)
  for n, gradient in got["gradients"].items():
    parts = [wide(x["gradients"][n]) for x in want]
    total = np.stack(parts) if n == mapped else sum(parts)
    error = contract.relative_error(gradient, total)
    # Sums of narrow gradients are rounded once more.
    limit = max(contract.tolerance(jnp.float32, 64), float(jnp.finfo(gradient.dtype).eps))
    assert error <= limit, f"gradient of {n}: {error:.1e}"
  for n, value in got["values"].items():
    error = contract.relative_error(value, np.stack([wide(x["values"][n]) for x in want]))
    assert error <= contract.tolerance(jnp.float32, 64), f"{n}: {error:.1e}"

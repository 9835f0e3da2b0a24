"""Checks on a GPU: values and gradients, bits that repeat, in memory full of NaN.

A scan is given as `call(inputs, implementation)`, with arrays by name and results by name.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.ops import contract, promises

REPETITIONS = 100


def fill_memory_with_nan():
  """Makes memory that is allocated next hold NaN until it is written."""
  device = jax.devices()[0]
  stats = device.memory_stats()
  block = 2**30
  blocks = int(0.8 * (stats["bytes_limit"] - stats["bytes_in_use"])) // block
  arrays = [jnp.full((block // 4,), jnp.nan, jnp.float32) for _ in range(blocks)]
  jax.block_until_ready(arrays)
  for x in arrays:
    x.delete()


@jax.jit
def same_bits(a, b):
  bits = lambda x: jax.lax.bitcast_convert_type(
    x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32
  )
  same = jax.tree.map(lambda x, y: jnp.all(bits(x) == bits(y)), a, b)
  return jnp.all(jnp.stack(jax.tree.leaves(same)))


def assert_bits_repeat(run, first):
  """`run()` gives the bits of `first` again and again, in memory full of NaN now and then."""
  counts = []
  for n in range(REPETITIONS):
    if n % 25 == 0:
      fill_memory_with_nan()
    counts.append(same_bits(run(), first))
  assert np.all(np.asarray(jnp.stack(counts))), f"{np.asarray(counts).sum()} of {REPETITIONS} agree"


def assert_values_and_gradients(scan, case, dtype):
  """The kernels of a scan on a case of its contract, in memory full of NaN."""
  fill_memory_with_nan()
  contract.assert_case(scan, case, dtype, "pallas")


@functools.partial(jax.jit, static_argnums=(0, 3))
def with_gradients(call, inputs, weights, implementation):
  """Results of `call`, and the gradients of their sum weighted with `weights`."""

  def functional(inputs):
    results = call(inputs, implementation)
    products = [jnp.sum(y.astype(weights[n].dtype) * weights[n]) for n, y in results.items()]
    return sum(products), results

  (_, results), gradients = jax.value_and_grad(functional, has_aux=True)(inputs)
  return {"values": results, "gradients": gradients}


def shapes_of(call, inputs):
  return jax.eval_shape(functools.partial(call, implementation="pallas"), inputs)


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


def assert_part_matches_reference(call, inputs, weights, part, dtype):
  """Every bit of all results repeats; a part of them equals the reference in float64.

  `part(arrays)` takes the same heads or channels of inputs, weights, results and gradients: what
  is in the part depends on nothing outside of it.
  """
  fill_memory_with_nan()
  first = with_gradients(call, inputs, weights, "pallas")
  finite = jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), first)
  assert all(jax.tree.leaves(finite)), finite
  assert_bits_repeat(lambda: with_gradients(call, inputs, weights, "pallas"), first)
  with jax.enable_x64(True):
    exact = [
      jax.tree.map(lambda x: x.astype(jnp.float64), part(arrays)) for arrays in (inputs, weights)
    ]
    want = jax.tree.map(np.asarray, with_gradients(call, *exact, "reference"))
  got = {kind: jax.tree.map(np.asarray, part(arrays)) for kind, arrays in first.items()}
  contract.assert_small(contract.named_errors(got, want), dtype, weights["out"].shape[1])


def assert_vmap_matches_separate_calls(call, inputs):
  """`vmap` runs the same kernels over a larger grid."""
  weights = jax.tree.map(lambda s: jnp.ones(s.shape), shapes_of(call, inputs[0]))
  run = lambda x: with_gradients(call, x, weights, "pallas")
  stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
  promises.close(jax.vmap(run)(stack(*inputs)), stack(*map(run, inputs)))


def mirrored(inputs):
  """Other inputs of the same shapes."""
  return jax.tree.map(lambda x: x[..., ::-1], inputs)

"""Helpers of the tests on a GPU: memory full of NaN, and runs that must agree bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.ops import contract

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
  """The kernels of a scan agree with the reference in float64 on a case of its contract.

  Inputs that may be narrow have this dtype; memory that nothing wrote holds NaN.
  """
  inputs = scan.inputs(case)
  dtypes = {n: dtype if n in scan.narrow else jnp.float32 for n in inputs}
  call = lambda x, form: scan.compared(*scan(case, x, implementation=form))
  fill_memory_with_nan()
  errors = contract.errors_against_reference(call, inputs, dtypes, "pallas")
  contract.assert_small(errors, dtype, case.T)

"""`tests.eager`: NumPy has the numbers of XLA, bit by bit, in what it computes in its place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests import eager

RANDOM = np.random.default_rng(0)
X, Y = jnp.asarray(RANDOM.normal(size=(2, 3, 4)), jnp.float32)
N = jnp.asarray(RANDOM.integers(-5, 5, (3, 4)), jnp.int32)
NARROW = [x.astype(dtype) for x in (X, Y) for dtype in (jnp.bfloat16, jnp.float16, jnp.int8)]


def operations(x, y, n, narrow):
  """Results of one operation each; `y` is not a number somewhere."""
  b, h, i, c, k, j = narrow
  lax = jax.lax
  return [
    *(x + y, x - y, x * y, x / y, -x, abs(y), jnp.sqrt(x), n * n, b * c, b + c, h - k, i + j),
    *(x < y, x >= y, x == y, x != y, n > 0, n & 3, ~n, jnp.isfinite(y), n / 2, x * 2, 1 + n),
    *(jnp.where(n > 0, x, y), jnp.maximum(x, y), jnp.minimum(x, y), jnp.clip(x, -0.1, 0.2)),
    *(y.max(0), x.min(), (n > 0).any(1), (n > 0).all(), x.astype(jnp.bfloat16), n.astype(float)),
    *(x[1], x[-1, 2], x[:, 1:3], x[::2], x[None], x.T, x[::-1], x.reshape(2, 6), n.astype(bool)),
    *(jnp.split(x, 2, 1)[1], lax.dynamic_slice(x, (5, -9), (2, 2))),
    *(lax.dynamic_update_slice(x, y[:2], (2, 0)), jnp.concatenate([x, y], 1), jnp.stack([x, y])),
    *(jnp.broadcast_to(x[:, :1], (3, 5)), jnp.arange(7), jnp.full(3, 2.0), jnp.tile(x, 2)),
  ]


def test_operations_have_the_bits_of_compiled_ones():
  arguments = X, Y.at[0, 0].set(jnp.nan), N, NARROW
  jaxpr = jax.make_jaxpr(operations)(*arguments).jaxpr
  assert eager._known(jaxpr)
  with np.errstate(all="ignore"):
    got = eager._run(jaxpr, [np.asarray(x) for x in jax.tree.leaves(arguments)])
  for x, want in zip(got, jax.jit(operations)(*arguments), strict=True):
    assert x.dtype == want.dtype
    np.testing.assert_array_equal(x, want)


def test_rest_is_compiled():
  known = lambda f, *x: eager._known(jax.make_jaxpr(f)(*x).jaxpr)
  assert known(lambda x: x + 1, X)
  for f in (jnp.exp, jnp.sum, lambda x: x.astype(int), lambda x: x.astype(jnp.bfloat16) / 3):
    assert not known(f, X)
  assert not known(lambda n: n // 2, N)
  assert not known(lambda x: x + 1, jax.ShapeDtypeStruct((200_000,), jnp.float32))
  with jax.enable_x64(True):  # rounded once, but by NumPy twice
    assert not known(lambda x: x.astype(jnp.bfloat16), np.zeros(3))


def test_operations_are_not_compiled_and_have_the_types_of_jax():
  if not eager.install():
    pytest.skip("this jax has no place for it")
  compiled = []
  listener = lambda name, _, **of: compiled.append(of) if "backend_compile" in name else None
  x = jax.device_put(np.ones((3, 1, 5, 1, 7), np.float32))  # a shape that no other test has
  jax.monitoring.register_event_duration_secs_listener(listener)
  try:
    y = (2 * x)[:, 0].T
    z = jnp.asarray(2) * jnp.bfloat16(3)
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)
  with jax.enable_x64(True):
    wide = jax.device_put(np.ones((1, 3, 1, 2)))
  assert compiled == [] and (wide * wide)[0].dtype == np.float64
  assert (y.shape, y.dtype, y.weak_type, y.committed) == ((7, 1, 5, 3), jnp.float32, False, False)
  assert (z.dtype, jnp.asarray(2.0).weak_type, y.sharding) == (jnp.bfloat16, True, X.sharding)


def test_numbers_are_drawn_as_by_a_program_of_their_shape():
  key = jax.random.key(3)
  draws = lambda key: (
    jax.random.normal(key, (3, 7)),
    jax.random.normal(key, (2, 2), jnp.bfloat16),
    jax.random.uniform(key, (5,), minval=-1, maxval=3),
    jax.random.truncated_normal(key, -2.0, 2.0, (100, 3)),
    jax.random.uniform(key, (3,), minval=jnp.arange(3.0), maxval=5.0),
    jax.random.categorical(key, jnp.zeros((3, 5))),
  )
  for got, want in zip(draws(key), jax.jit(draws)(key), strict=True):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_what_a_test_wants_to_know_of_an_operation_is_as_of_compiled_ones():
  """Where its result is, what it shares, what it takes away, and whether it is a number."""
  x = jnp.ones((2, 5, 1, 3))
  assert not np.shares_memory(np.asarray(x), np.asarray(x.reshape(5, 6)))
  assert (jax.device_put(x, jax.devices()[0]) + 1).committed
  placed = jax.device_put(x, NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec()))
  assert isinstance((placed + 1).sharding, NamedSharding)

  def square(x):  # a name of `NAMES`
    return x * x

  jax.jit(square, donate_argnums=0)(x)
  assert x.is_deleted()
  with jax.debug_nans(True), pytest.raises(FloatingPointError):
    jnp.zeros((2, 5, 1, 3)) / 0

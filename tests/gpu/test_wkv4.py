"""The kernels of RWKV-4's scan on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.wkv4.cases import WKV4, Case
from tests.gpu.hardware import assert_bits_repeat, assert_values_and_gradients, fill_memory_with_nan
from tests.ops import contract, promises

pytestmark = pytest.mark.gpu

F32, BF16 = jnp.float32, jnp.bfloat16
SMALL = [
  (Case(T=1000, D=130, keys="wide", strength="extreme", segments=True, chunk=None), F32),
  (Case(T=1000, D=130, strength="weak", chunk=None), F32),
  (Case(T=130, keys="two", strength="extreme", chunk=None), F32),
  (Case(T=600, keys="two", strength="weak", chunk=None), BF16),
  (Case(T=1, D=130, chunk=None), F32),
]


@pytest.mark.parametrize(("case", "dtype"), SMALL, ids=str)
def test_wkv4_on_gpu_matches_reference(case, dtype):
  assert_values_and_gradients(WKV4, case, dtype)


def drawn(B, T, D, dtype):
  keys = jax.random.split(jax.random.key(0), 4)
  normal = lambda key, *shape: jax.random.normal(key, shape)
  return {
    "k": 3 * normal(keys[0], B, T, D).astype(dtype),
    "v": normal(keys[1], B, T, D).astype(dtype),
    "decay_rate": jnp.exp(normal(keys[2], D) - 2),
    "bonus": normal(keys[3], D),
  }


@functools.partial(jax.jit, static_argnums=1)
def with_gradients(inputs, implementation):
  """`wkv4`, and the gradients of a sum in which no two steps weigh alike."""

  def functional(inputs):
    out, state = ops.wkv4(**inputs, implementation=implementation)
    wide = out.astype(inputs["bonus"].dtype)
    weight = jnp.cos(jnp.arange(wide.shape[1], dtype=wide.dtype))[:, None]
    mean = state.numerator / state.denominator
    return jnp.sum(wide * weight) + jnp.sum(mean), {"out": out, "mean": mean}

  (_, values), gradients = jax.value_and_grad(functional, has_aux=True)(inputs)
  return {"values": values, "gradients": gradients}


@pytest.mark.parametrize(
  ("sizes", "dtype"),
  [((8, 2048, 2048), F32), ((8, 2048, 2048), BF16), ((1, 32768, 2048), F32)],
  ids=str,
)
def test_wkv4_at_model_sizes_matches_reference(sizes, dtype):
  """128 channels against the reference; every bit of all, again and again."""
  inputs = drawn(*sizes, dtype)
  fill_memory_with_nan()
  first = with_gradients(inputs, "pallas")
  assert_bits_repeat(lambda: with_gradients(inputs, "pallas"), first)
  channels = slice(-200, -72)
  with jax.enable_x64(True):
    exact = {n: x[..., channels].astype(jnp.float64) for n, x in inputs.items()}
    want = jax.tree.map(np.asarray, with_gradients(exact, "reference"))
  got = jax.tree.map(lambda x: np.asarray(x[..., channels]), first)
  errors = contract.named_errors(got, want)
  contract.assert_small(errors, dtype, sizes[1])


def test_wkv4_under_vmap_matches_separate_calls():
  """`vmap` runs the same kernels over a larger grid."""
  inputs = [drawn(2, 200, 130, F32) for _ in range(2)]
  inputs[1] = jax.tree.map(lambda x: x[..., ::-1], inputs[1])
  stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
  apart = stack(*(with_gradients(x, "pallas") for x in inputs))
  at_once = jax.vmap(lambda x: with_gradients(x, "pallas"))(stack(*inputs))
  promises.close(at_once, apart)

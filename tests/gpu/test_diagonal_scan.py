"""The kernels of the diagonal scan on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.diagonal_scan.cases import DIAGONAL_SCAN, Case
from tests.gpu.hardware import assert_bits_repeat, assert_values_and_gradients, fill_memory_with_nan
from tests.ops import contract, promises

pytestmark = pytest.mark.gpu

F32, BF16 = jnp.float32, jnp.bfloat16
SMALL = [
  (Case(T=1000, D=130), F32),
  (Case(T=1000, D=130, strength="weak", constant=True, segments=True, reverse=True), F32),
  (Case(T=1000, complex_="ax", segments=True, strength="extreme"), F32),
  (Case(T=130, complex_="x", constant=True), F32),
  (Case(T=1000, D=130, segments=True), BF16),
  (Case(T=1, D=130, reverse=True), F32),
]


@pytest.mark.parametrize(("case", "dtype"), SMALL, ids=str)
def test_diagonal_scan_on_gpu_matches_reference(case, dtype):
  assert_values_and_gradients(DIAGONAL_SCAN, case, dtype)


def drawn(B, T, D, dtype, *, constant=False):
  keys = jax.random.split(jax.random.key(0), 3)
  shape = (D,) if constant else (B, T, D)
  return {
    "decay": jnp.exp(-jnp.exp(jax.random.normal(keys[0], shape) - 2)),
    "x": jax.random.normal(keys[1], (B, T, D)).astype(dtype),
    "h": jax.random.normal(keys[2], (B, D)),
  }


@functools.partial(jax.jit, static_argnums=(1, 2))
def with_gradients(inputs, implementation, reverse):
  """`diagonal_scan`, and the gradients of a sum in which no two steps weigh alike."""

  def functional(inputs):
    state = ops.DiagonalState(inputs["h"])
    options = {"reverse": reverse, "implementation": implementation}
    out, last = ops.diagonal_scan(inputs["decay"], inputs["x"], initial_state=state, **options)
    wide = out.astype(inputs["h"].dtype)
    weight = jnp.cos(jnp.arange(wide.shape[1], dtype=wide.dtype))[:, None]
    return jnp.sum(wide * weight) + jnp.sum(last.h), {"out": out, "h": last.h}

  (_, values), gradients = jax.value_and_grad(functional, has_aux=True)(inputs)
  return {"values": values, "gradients": gradients}


@pytest.mark.parametrize(
  ("sizes", "dtype", "constant", "reverse"),
  [
    ((8, 2048, 2048), F32, False, False),
    ((8, 2048, 2048), BF16, False, True),
    ((1, 32768, 2048), F32, False, True),
    ((1, 32768, 2048), F32, True, False),
  ],
  ids=str,
)
def test_diagonal_scan_at_model_sizes_matches_reference(sizes, dtype, constant, reverse):
  """128 channels against the reference; every bit of all, again and again."""
  inputs = drawn(*sizes, dtype, constant=constant)
  fill_memory_with_nan()
  first = with_gradients(inputs, "pallas", reverse)
  assert_bits_repeat(lambda: with_gradients(inputs, "pallas", reverse), first)
  channels = slice(-200, -72)
  with jax.enable_x64(True):
    exact = {n: x[..., channels].astype(jnp.float64) for n, x in inputs.items()}
    want = jax.tree.map(np.asarray, with_gradients(exact, "reference", reverse))
  got = jax.tree.map(lambda x: np.asarray(x[..., channels]), first)
  errors = contract.named_errors(got, want)
  contract.assert_small(errors, dtype, sizes[1])


def test_diagonal_scan_under_vmap_matches_separate_calls():
  """`vmap` runs the same kernels over a larger grid."""
  inputs = [drawn(2, 200, 130, F32) for _ in range(2)]
  inputs[1] = jax.tree.map(lambda x: x[..., ::-1], inputs[1])
  stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
  apart = stack(*(with_gradients(x, "pallas", False) for x in inputs))
  at_once = jax.vmap(lambda x: with_gradients(x, "pallas", False))(stack(*inputs))
  promises.close(at_once, apart)

"""The kernels of the diagonal scan on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax import ops
from tests.gpu.hardware import (
  assert_part_matches_reference,
  assert_values_and_gradients,
  assert_vmap_matches_separate_calls,
  waves,
)
from tests.ops.cases.diagonal_scan import DIAGONAL_SCAN, Case

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


def drawn(B, T, D, dtype, seed, *, constant=False):
  keys = jax.random.split(jax.random.key(seed), 3)
  shape = (D,) if constant else (B, T, D)
  return {
    "decay": jnp.exp(-jnp.exp(jax.random.normal(keys[0], shape) - 2)),
    "x": jax.random.normal(keys[1], (B, T, D)).astype(dtype),
    "h": jax.random.normal(keys[2], (B, D)),
  }


def run(inputs, implementation, reverse=False):
  out, last = ops.diagonal_scan(
    inputs["decay"],
    inputs["x"],
    reverse=reverse,
    initial_state=ops.DiagonalState(inputs["h"]),
    implementation=implementation,
  )
  return {"out": out, "h": last.h}


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
  call = functools.partial(run, reverse=reverse)

  def problem(seed):
    inputs = drawn(*sizes, dtype, seed, constant=constant)
    return inputs, waves(call, inputs)

  channels = lambda arrays: {n: x[..., -200:-72] for n, x in arrays.items()}
  assert_part_matches_reference(call, problem, channels, dtype)


def test_diagonal_scan_under_vmap_matches_separate_calls():
  def problem(seed):
    inputs = drawn(2, 200, 130, F32, seed)
    return inputs, waves(run, inputs)

  assert_vmap_matches_separate_calls(run, problem, "x")

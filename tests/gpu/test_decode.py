"""The decode kernels on a Hopper GPU: `make test-gpu`."""

import jax.numpy as jnp
import pytest

from tests.gpu.hardware import (
  alone,
  assert_bits_repeat,
  assert_values_and_gradients,
  compiled,
  same_bits,
)
from tests.kernels.interpreted import inputs_of
from tests.kernels.test_decode_scans import CASES, FITTING
from tests.ops.cases.linear_attention import LINEAR_ATTENTION
from tests.ops.cases.linear_attention import Case as Heads

pytestmark = pytest.mark.gpu

STEPS = [
  *CASES,
  (LINEAR_ATTENTION, Heads(T=1, K=16, V=16, decay="HK", chunk=None, normalize=True), jnp.float32),
  (LINEAR_ATTENTION, Heads(T=1, K=40, V=24, decay="BTHK", chunk=None, bonus=True), jnp.bfloat16),
]


@pytest.mark.parametrize(
  ("scan", "case", "dtype"),
  STEPS,
  ids=lambda x: getattr(getattr(x, "function", None), "__name__", str(x)),
)
def test_decode_on_gpu_matches_reference(scan, case, dtype):
  assert_values_and_gradients(scan, case, dtype)


@pytest.mark.parametrize("name", FITTING)
def test_decode_on_gpu_twice_repeats_bits(name):
  scan, case = FITTING[name]
  inputs = inputs_of(scan, case)
  run = compiled(lambda x: scan(case, x, implementation="pallas"), inputs)
  same = compiled(same_bits, run.out_info, run.out_info)
  with alone:
    assert_bits_repeat(run, [inputs], same)

"""The kernels of the norms on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax import ops
from tests.gpu.hardware import (
  alone,
  assert_bits_repeat,
  assert_vmap_matches_separate_calls,
  compiled,
  errors_against_reference,
  random_weights,
  same_bits,
)
from tests.kernels.test_norms import BF16, Case, check, dtypes_of

pytestmark = pytest.mark.gpu

CASES = [
  Case(shape=(2, 1000, 1024), arrays=("scale", "added"), dtype=BF16),
  Case(shape=(2, 1000, 1024), arrays=("scale", "bias", "added"), center=True),
  Case(shape=(2, 500, 4, 256), arrays=("scale", "gate"), dtype=BF16),
  Case(shape=(2, 500, 8, 128), arrays=(), dtype=BF16, factor=128**-0.5, rounded=True),
  Case(shape=(2, 333, 2048), arrays=("scale", "gate"), dtype=BF16, gate_first=True),
  Case(shape=(2, 501, 768), arrays=("scale",), floor=1.0),
  Case(shape=(3, 7, 64), arrays=("scale", "bias", "gate"), center=True),
  Case(
    shape=(2, 1000, 16, 64),
    arrays=("scale", "bias", "gate"),
    dtype=BF16,
    center=True,
    per_head=("scale", "bias"),
  ),
  Case(shape=(2, 501, 6, 128), arrays=("scale",), per_head=("scale",)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_norms_on_gpu_match_reference(case):
  check(case, "pallas", errors_against_reference)


def drawn(case, seed):
  names = ("x", *case.arrays)
  dtypes, keys = dtypes_of(case, names), jax.random.split(jax.random.key(seed), len(names))
  return {
    n: jax.random.normal(key, case.shape[-1:] if n == "scale" else case.shape).astype(dtypes[n])
    for key, n in zip(keys, names, strict=True)
  }


def test_norms_at_model_sizes_repeat_bits():
  case = Case(shape=(16, 2048, 1024), arrays=("scale", "added"), dtype=BF16)

  def run(arrays):
    def total(arrays):
      y, s = ops.normalize(**arrays, dtype=BF16, implementation="pallas")
      return jnp.sum(y.astype(jnp.float32) * jnp.cos(s.astype(jnp.float32))), (y, s)

    return jax.grad(total, has_aux=True)(arrays)

  seed = jnp.int32(0)
  make = compiled(lambda seed: drawn(case, seed), seed)
  program = compiled(run, make.out_info)
  same = compiled(same_bits, program.out_info, program.out_info)
  with alone:
    assert_bits_repeat(program, [make(seed)], same)


def test_norms_under_vmap_match_separate_calls():
  case = Case(shape=(2, 200, 1024), arrays=("scale", "added"), dtype=BF16)

  def call(inputs, implementation):
    y, s = ops.normalize(**inputs, dtype=BF16, implementation=implementation)
    return {"out": y, "sum": s}

  def problem(seed):
    inputs = drawn(case, seed)
    return inputs, random_weights(call, inputs)

  assert_vmap_matches_separate_calls(call, problem, "scale")

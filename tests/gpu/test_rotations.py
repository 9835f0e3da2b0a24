"""The kernels of rotations on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import jax
import jax.numpy as jnp
import pytest

from tests.gpu.hardware import (
  alone,
  assert_bits_repeat,
  compiled,
  errors_against_reference,
  same_bits,
)
from tests.kernels.test_rotations import BF16, F32, Case, both, check, drawn

pytestmark = pytest.mark.gpu

CASES = [
  Case(BF16, 1000, 32, 128, 32),
  Case(F32, 333, 8, 96, 32),
  Case(F32, 500, 4, 128, 64),
  Case(BF16, 70, 16, 64, 32),
  Case(BF16, 300, 32, 128, 32, R=4),
  Case(F32, 70, 32, 64, 32, R=3, G=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rotations_on_gpu_match_reference(case):
  check(case, "pallas", errors_against_reference)


def test_rotations_at_model_sizes_repeat_bits():
  x, ids = drawn(2048, 32, 128, 32)
  x = {n: jnp.asarray(z, BF16 if n in ("keys", "queries") else F32) for n, z in x.items()}
  ids = jnp.asarray(ids, jnp.int32)

  def run(x):
    def total(x):
      found = both(x, ids, BF16, "pallas")
      k, q = found["k"].astype(F32), found["q"].astype(F32)
      return jnp.sum(k * jnp.cos(q)), (found["k"], found["q"])

    return jax.grad(total, has_aux=True)(x)

  program = compiled(run, x)
  same = compiled(same_bits, program.out_info, program.out_info)
  with alone:
    assert_bits_repeat(program, [x], same)

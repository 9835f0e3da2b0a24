"""Mixtures of experts by JAX's kernels for groups of rows, on a Hopper GPU: `make test-gpu`.

Everything is compared with the form in blocks in float64, all gradients too.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax.models import experts
from tests.gpu.hardware import alone, assert_bits_repeat, compiled, same_bits
from tests.kernels.test_grouped_products import BF16, gradients, problem
from tests.ops.contract import relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
  ("N", "D", "F", "E", "chosen"),
  [
    pytest.param(2000, 256, 192, 8, [0, 2, 3, 7], id="some select none"),
    pytest.param(1500, 128, 64, 2, [0, 1], id="two"),
    pytest.param(1501, 256, 128, 8, [5, 6], id="two of eight"),
    pytest.param(2048, 192, 256, 4, list(range(-4, 8)), id="of other devices"),
  ],
)
def test_mixtures_on_gpu_match_float64_and_repeat_bits(N, D, F, E, chosen):
  inputs, cotangent, indices = problem(N, D, F, E, chosen)
  x64 = functools.partial(gradients, dtype=jnp.float64)
  reference = compiled(x64, inputs, cotangent, indices, x64=True)
  dtypes = [BF16, BF16, jnp.float32]
  narrow = [
    jax.tree.map(lambda z, d=d: jnp.asarray(z, d), x) for x, d in zip(inputs, dtypes, strict=True)
  ]
  arrays = narrow, jnp.asarray(cotangent, jnp.float32), jnp.asarray(indices)
  assert experts._grouped_product(2 * N, E, (D, F), BF16) is not None
  program = compiled(functools.partial(gradients, dtype=BF16), *arrays)
  same = compiled(same_bits, program.out_info, program.out_info)
  with alone:
    found = assert_bits_repeat(program, arrays, same)
    want = reference(inputs, cotangent, indices)
  for pair in zip(*map(jax.tree.leaves, (found, want)), strict=True):
    assert relative_error(*pair) < 1e-2

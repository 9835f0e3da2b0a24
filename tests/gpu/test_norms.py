"""The kernels of the norms on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax import ops
from tests.gpu.hardware import assert_bits_repeat, fill_memory_with_nan
from tests.kernels.test_norms import BF16, Case, check, drawn

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
  fill_memory_with_nan()
  check(case, "pallas")


def test_norms_at_model_sizes_repeat_bits():
  case = Case(shape=(16, 2048, 1024), arrays=("scale", "added"))
  arrays = {
    n: jnp.asarray(z, jnp.float32 if n == "scale" else BF16) for n, z in drawn(case).items()
  }

  @jax.jit
  def run(arrays):
    def total(arrays):
      y, s = ops.normalize(**arrays, dtype=BF16, implementation="pallas")
      return jnp.sum(y.astype(jnp.float32) * jnp.cos(s.astype(jnp.float32))), (y, s)

    return jax.grad(total, has_aux=True)(arrays)

  fill_memory_with_nan()
  assert_bits_repeat(lambda: run(arrays), run(arrays))

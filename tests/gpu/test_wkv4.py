"""The kernels of RWKV-4's scan on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

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
from tests.ops.cases.wkv4 import WKV4, Case

pytestmark = pytest.mark.gpu

F32, BF16 = jnp.float32, jnp.bfloat16
SMALL = [
  (Case(T=1000, D=130, keys="wide", strength="extreme", segments=True, chunk=None), F32),
  (Case(T=1000, D=130, strength="weak", segments=True, chunk=None), F32),
  (Case(T=130, keys="two", strength="extreme", chunk=None), F32),
  (Case(T=600, keys="two", strength="weak", chunk=None), BF16),
  (Case(T=1, D=130, chunk=None), F32),
]


@pytest.mark.parametrize(("case", "dtype"), SMALL, ids=str)
def test_wkv4_on_gpu_matches_reference(case, dtype):
  assert_values_and_gradients(WKV4, case, dtype)


def drawn(B, T, D, dtype, seed):
  keys = jax.random.split(jax.random.key(seed), 4)
  normal = lambda key, *shape: jax.random.normal(key, shape)
  return {
    "k": 3 * normal(keys[0], B, T, D).astype(dtype),
    "v": normal(keys[1], B, T, D).astype(dtype),
    "decay_rate": jnp.exp(normal(keys[2], D) - 2),
    "bonus": normal(keys[3], D),
  }


def run(inputs, implementation):
  out, state = ops.wkv4(**inputs, implementation=implementation)
  return {"out": out, "mean": state.numerator / state.denominator}


@pytest.mark.parametrize(
  ("sizes", "dtype"),
  [((8, 2048, 2048), F32), ((8, 2048, 2048), BF16), ((1, 32768, 2048), F32)],
  ids=str,
)
def test_wkv4_at_model_sizes_matches_reference(sizes, dtype):
  """128 channels against the reference; every bit of all, again and again."""

  def problem(seed):
    inputs = drawn(*sizes, dtype, seed)
    return inputs, waves(run, inputs)

  channels = lambda arrays: {n: x[..., -200:-72] for n, x in arrays.items()}
  assert_part_matches_reference(run, problem, channels, dtype)


def test_wkv4_under_vmap_matches_separate_calls():
  def problem(seed):
    inputs = drawn(2, 200, 130, F32, seed)
    return inputs, waves(run, inputs)

  assert_vmap_matches_separate_calls(run, problem, "bonus")
